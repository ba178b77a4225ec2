"""Everything that can be wrong with a wheel or a series: one clear error that names the file, and nothing left."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fork.toy import ALPHA, Toy, diff
from tlt_server.errors import ForkError, PatchError
from tlt_server.fork.pristine import Host, Release, require_host, require_python
from tlt_server.fork.refresh import refresh


def edit(name: str, old: str, new: str) -> Callable[[Toy], object]:
    def apply(toy: Toy) -> None:
        text = (toy.root / name).read_text()
        assert old in text
        (toy.root / name).write_text(text.replace(old, new, 1))

    return apply


def add(name: str, content: str = "") -> Callable[[Toy], object]:
    return lambda toy: (toy.root / name).write_text(content)


def append(name: str, patch: str, content: str) -> Callable[[Toy], object]:
    def apply(toy: Toy) -> None:
        toy.patch(patch, content)
        (toy.root / name).write_text((toy.root / name).read_text() + patch + "\n")

    return apply


def upstream(path: str, content: str) -> Callable[[Toy], object]:
    def apply(toy: Toy) -> None:
        toy.files[path] = content
        toy.pack()

    return apply


SERIES_ERRORS = {
    "orphan patch": (add("0009-orphan.patch"), ["0009-orphan.patch", "belongs to no series"]),
    "orphan file": (add("notes.txt"), ["notes.txt", "belongs to no series"]),
    "orphan folder": (lambda toy: (toy.root / "old").mkdir(), ["old", "belongs to no series"]),
    "listed, missing": (lambda toy: (toy.root / "0002-two.patch").unlink(), ["0002-two.patch is missing"]),
    "listed twice": (edit("series", "0003-new.patch", "0001-one.patch"), ["0001-one.patch twice"]),
    "name": (edit("series", "0003-new", "../escape"), ["../escape.patch", "NNNN-words.patch"]),
    "no series": (lambda toy: (toy.root / "series").unlink(), ["series is missing"]),
    "no images": (lambda toy: (toy.root / "images.sha256").unlink(), ["images.sha256 is missing"]),
    "images form": (edit("images.sha256", "sglang/new.py", ""), ["images.sha256", "before after path"]),
    "image not listed": (edit("images.sha256", "sglang/new.py", "sglang/newer.py"), ["sglang/new.py", "refresh"]),
    "after": (edit("0003-new.patch", "n = 1", "n = 2"), ["sglang/new.py after the series", "images.sha256"]),
    "does not apply": (edit("0002-two.patch", " a19", " a18"), ["0002-two.patch does not apply", "sglang/alpha.py"]),
    "not a patch": (add("0003-new.patch", "Subject: s\n"), ["0003-new.patch is not a patch"]),
    "not python": (
        append("series", "0004-x.patch", diff("sglang/data.txt", "@@ -1 +1 @@\n-1\n+2\n")),
        ["0004-x.patch", "sglang/data.txt", "only .py"],
    ),
    "deletes": (
        append(
            "series",
            "0004-x.patch",
            "diff --git a/sglang/beta.py b/sglang/beta.py\ndeleted file mode 100644\n"
            "--- a/sglang/beta.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-b = 1\n",
        ),
        ["0004-x.patch deletes sglang/beta.py"],
    ),
    "outside": (
        append("series", "0004-x.patch", diff("../x.py", "@@ -0,0 +1 @@\n+n = 1\n", "new file mode 100644\n")),
        ["0004-x.patch", "../x.py"],
    ),
    "upstream changed": (upstream("sglang/alpha.py", ALPHA + "z = 1\n"), ["sglang/alpha.py in", "pristine.whl"]),
    "upstream has the new file": (upstream("sglang/new.py", "n = 1\n"), ["sglang/new.py in", "no such file"]),
    "upstream's version": (upstream("sglang/_version.py", "version = '1'"), ["sglang/_version.py", "0 times"]),
}


@pytest.mark.parametrize(("break_it", "words"), SERIES_ERRORS.values(), ids=SERIES_ERRORS.keys())
def test_a_series_that_does_not_fit_is_refused(toy: Toy, break_it: Callable[[Toy], object], words: list[str]) -> None:
    break_it(toy)
    with pytest.raises(PatchError) as caught:
        toy.build()
    for word in words:
        assert word in str(caught.value)
    toy.assert_nothing_left()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(ALPHA) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_patched_file_is_refused(toy: Toy, at: int, bit: int) -> None:
    flipped = bytearray(ALPHA.encode())
    flipped[at] ^= 1 << bit
    toy.files["sglang/alpha.py"] = bytes(flipped)
    toy.pack()
    with pytest.raises(PatchError, match=r"sglang/alpha\.py in .*pristine\.whl"):
        toy.build()
    toy.assert_nothing_left()


def test_a_wrong_wheel_is_refused(toy: Toy) -> None:
    release = toy.release
    toy.wheel.write_bytes(toy.wheel.read_bytes() + b"\0")
    with pytest.raises(ForkError) as caught:
        toy.build(release)
    (expected,) = release.wheels.values()
    (found,) = toy.release.wheels.values()
    for word in (str(toy.wheel), found, expected):
        assert word in str(caught.value)
    toy.wheel.unlink()
    with pytest.raises(ForkError, match=r"pristine\.whl is not a file"):
        toy.build(release)
    toy.assert_nothing_left()


def test_git_is_asked_for_by_name(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(toy.scratch))
    with pytest.raises(ForkError, match="git is not on PATH"):
        toy.build()
    toy.assert_nothing_left()


def ignored_folder(toy: Toy, name: str) -> Path:
    """A folder that a repository ignores, and where git therefore skips a patch without a word."""
    repository = toy.home / "repository"
    folder = repository / "ignored" / name
    (folder / "sglang").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", repository], check=True)
    (repository / ".gitignore").write_text("ignored/\n")
    (folder / "sglang/alpha.py").write_text(ALPHA)
    subprocess.run(["git", "apply", toy.root / "0001-one.patch"], cwd=folder, check=True)
    assert (folder / "sglang/alpha.py").read_text() == ALPHA, "git does not skip here: the trap is gone"
    return folder


def test_a_git_ignored_folder_is_no_trap(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = toy.build().wheel.read_bytes()
    toy.clear()
    monkeypatch.setattr("tempfile.tempdir", str(ignored_folder(toy, "tmp")))
    monkeypatch.setenv("GIT_DIR", str(toy.home / "repository/.git"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "apply.whitespace")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "error-all")
    assert toy.build().wheel.read_bytes() == expected


def test_a_folder_that_cannot_be_shut_off_from_its_repository_is_refused(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A colon in a path ends an entry of GIT_CEILING_DIRECTORIES.
    monkeypatch.setattr("tempfile.tempdir", str(ignored_folder(toy, f"a{os.pathsep}b")))
    with pytest.raises(ForkError, match="lies inside the git repository"):
        toy.build()
    toy.assert_nothing_left()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host("Darwin", "arm64", ""), "Darwin arm64"),
        (Host("Linux", "aarch64", "glibc 2.39"), "Linux aarch64"),
        (Host("Windows", "AMD64", ""), "Windows AMD64"),
        (Host("Linux", "x86_64", "glibc 2.33"), r"glibc 2\.33"),
        (Host("Linux", "x86_64", "glibc 1.99"), r"glibc 1\.99"),
        (Host("Linux", "x86_64", ""), "not glibc"),
    ],
)
def test_other_machines_are_refused_by_name(host: Host, words: str) -> None:
    with pytest.raises(ForkError, match=f"{words}.*Linux x86-64 with glibc 2.34"):
        require_host(host)


@pytest.mark.parametrize("libc", ["glibc 2.34", "glibc 2.100", "glibc 3.0"])
def test_newer_machines_are_not(libc: str) -> None:
    require_host(Host("Linux", "x86_64", libc))
    require_host(Host.here())


@pytest.mark.parametrize("version", ["3.10", "3.13", "3", "2.7"])
def test_other_pythons_are_refused_by_name(version: str) -> None:
    with pytest.raises(ForkError, match=rf"Python 3\.11 and 3\.12, not {version}$"):
        require_python(version)


def test_refresh_takes_no_other_wheel(toy: Toy) -> None:
    before = (toy.root / "images.sha256").read_bytes()
    with pytest.raises(ForkError, match="has sha256"):
        refresh(toy.root, toy.wheel, Release("0.5.17", {"3.11": "0" * 64}))
    assert (toy.root / "images.sha256").read_bytes() == before
