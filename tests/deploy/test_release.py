"""`make release`, in a repository of the files that it changes."""

import datetime
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from deployment import DEPLOY

RELEASE = runpy.run_path(str(DEPLOY / "release.py"))
REPOSITORY = DEPLOY.parent
DAY = datetime.date(2030, 1, 2)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "name")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "name@example.com")
    for name in RELEASE["NUMBERED"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def release(scratch: Path, version: str) -> None:
    RELEASE["release"](scratch, version, DAY)


def test_it_commits_numbers_and_changelog_and_tags_them(scratch: Path) -> None:
    release(scratch, "98.0.1")
    assert git(scratch, "status", "--porcelain") == ""
    assert git(scratch, "show", "--no-patch", "--format=%s", "v98.0.1^{commit}").strip() == "Release 98.0.1"
    changed = git(scratch, "show", "--format=", "--name-only", "HEAD").split()
    assert sorted(changed) == sorted([*RELEASE["NUMBERED"], "CHANGELOG.md"])
    assert (scratch / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## [Unreleased]\n\n## [98.0.1] - 2030-01-02\n\n### Added\n\n- Something.\n"
    )
    for name, told in {
        "pyproject.toml": ['version = "98.0.1"', '"tlt-client==98.0.1"', '"tlt-grpo==98.0.1"'],
        "clients/tlt_client/pyproject.toml": ['version = "98.0.1"'],
        "clients/tlt_verl/pyproject.toml": ['version = "98.0.1"', '"tlt-client==98.0.1"'],
        "examples/grpo/pyproject.toml": ['version = "98.0.1"', '"tlt-client==98.0.1"', '"tlt-server==98.0.1"'],
        "tlt_server/__init__.py": ['__version__ = "98.0.1"'],
    }.items():
        assert all(line in (scratch / name).read_text() for line in told), name


def test_each_file_that_names_an_image_is_numbered() -> None:
    named = {path for path in DEPLOY.rglob("*") if path.is_file() and re.search(r"tlt-server:\d", path.read_text())}
    assert {str(path.relative_to(REPOSITORY)) for path in named} <= set(RELEASE["NUMBERED"])
    assert len(named) > 5


def test_what_cannot_be_released_changes_nothing(scratch: Path) -> None:
    release(scratch, "98.0.1")
    head = git(scratch, "rev-parse", "HEAD")
    for version, said in (
        ("98.1", "is no version"),
        ("98.0.1", "already"),
        ("98.0.2", "nothing that it is unreleased"),
    ):
        with pytest.raises(SystemExit, match=said):
            release(scratch, version)
    (scratch / "pyproject.toml").write_text("\n")
    with pytest.raises(SystemExit, match="commit or stash"):
        release(scratch, "98.0.2")
    assert git(scratch, "rev-parse", "HEAD") == head
    assert git(scratch, "tag").split() == ["v98.0.1"]
