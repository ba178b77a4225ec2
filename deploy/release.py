"""Makes a version of what is unreleased: numbers, changelog, commit, tag. Pushes nothing.

make release VERSION=0.2.0
"""

import datetime
import re
import subprocess
import sys
import tomllib
from pathlib import Path

NUMBERED = (
    "pyproject.toml",
    "clients/tlt_client/pyproject.toml",
    "clients/tlt_verl/pyproject.toml",
    "examples/grpo/pyproject.toml",
    "tlt_server/__init__.py",
    "deploy/compose.yaml",
    "deploy/cpu.Dockerfile",
    "deploy/gpu.Dockerfile",
    "deploy/kubernetes/front.yaml",
    "deploy/kubernetes/leaderworkerset.yaml",
    "deploy/kubernetes/rayservice.yaml",
    "deploy/kubernetes/servers.yaml",
    "deploy/kubernetes/trainer.yaml",
)
"""What names our version: each package's own and those that it needs of ours, and the images'."""
OURS = r"""(?m)(^version = "|^__version__ = "|tlt-(?:client|grpo|server)(?:==|:))"""
"""What stands before it."""
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"


def release(root: Path, version: str, day: datetime.date) -> None:
    """Commits and tags `version` in the repository at `root`.

    Raises:
        SystemExit: it is no version or there is one already, the tree is dirty, or nothing is unreleased.
        subprocess.CalledProcessError: git failed.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version!r} is no version: make release VERSION=x.y.z")
    if dirty := git(root, "status", "--porcelain"):
        raise SystemExit(f"commit or stash these first:\n{dirty}")
    log = (root / CHANGELOG).read_text()
    if git(root, "tag", "--list", f"v{version}") or f"## [{version}]" in log:
        raise SystemExit(f"there is a {version} already: name a later version")
    _, _, after = log.partition(UNRELEASED)
    if not re.split(r"(?m)^## ", after)[0].strip():
        raise SystemExit(f"{CHANGELOG} says of nothing that it is unreleased: write down what changed")
    old = re.escape(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    for name in NUMBERED:
        text, count = re.subn(OURS + old, rf"\g<1>{version}", (root / name).read_text())
        if not count:
            raise SystemExit(f"{name} does not name the version any more: mend NUMBERED in deploy/release.py")
        (root / name).write_text(text)
    (root / CHANGELOG).write_text(log.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {day}\n", 1))
    git(root, "commit", "--quiet", "--message", f"Release {version}", *NUMBERED, CHANGELOG)
    git(root, "tag", "--annotate", f"v{version}", "--message", f"tlt-server {version}")


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    release(Path(__file__).parents[1], "".join(sys.argv[1:]), datetime.datetime.now(datetime.UTC).date())
