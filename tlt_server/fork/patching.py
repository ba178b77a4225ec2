"""Applying the series: `git apply`, in a scratch folder that no repository can reach, on the files it touches.

`git apply` inside a git-ignored folder of a repository skips every file and exits 0. So the scratch folder is shut off
from whatever lies above it, that is checked before the first patch, and each patch must change each file it names.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from tlt_server.errors import ForkError, PatchError
from tlt_server.fork.series import IMAGES, Image, Patch, Series, sha256


@dataclass(frozen=True)
class PatchedFile:
    """One file of the wheel before (None where it is new) and after the series, its header line included."""

    before: bytes | None
    after: bytes

    @property
    def image(self) -> Image:
        return Image(None if self.before is None else sha256(self.before), sha256(self.after))


def apply_series(series: Series, pristine: ZipFile) -> Mapping[str, PatchedFile]:
    """Apply every patch, strictly and in order: path in the wheel -> that file. Raises PatchError for a patch that git
    refuses, skips, or that touches anything but .py files."""
    with tempfile.TemporaryDirectory(prefix="tlt-fork-") as scratch:
        tree = Path(scratch).resolve()
        if (found := _git(tree, "rev-parse", "--git-dir")).returncode == 0:
            raise ForkError(
                f"{tree} lies inside the git repository {found.stdout.strip()}, where git skips patches silently:"
                " set TMPDIR to a folder outside any repository"
            )
        before: dict[str, bytes | None] = {}
        touched_by: dict[str, list[str]] = {}
        for patch in series.patches:
            for path in _touched(tree, patch):
                if path not in before:
                    before[path] = content = pristine.read(path) if path in pristine.namelist() else None
                    if content is not None:
                        (tree / path).parent.mkdir(parents=True, exist_ok=True)
                        (tree / path).write_bytes(content)
                touched_by.setdefault(path, []).append(patch.name)
            _apply(tree, patch, [path for path, names in touched_by.items() if names[-1] == patch.name])
        return {
            path: PatchedFile(before[path], mark((tree / path).read_bytes(), names))
            for path, names in sorted(touched_by.items())
        }


def check_before(pristine: ZipFile, images: Mapping[str, Image]) -> None:
    """Raise PatchError, naming the file, unless the wheel has every file as the series was written for."""
    names = set(pristine.namelist())
    for path, image in images.items():
        found = sha256(pristine.read(path)) if path in names else None
        if found != image.before:
            raise PatchError(
                f"{path} in {pristine.filename} has sha256 {found or '- (no such file)'}, but the series was written"
                f" for {image.before or '- (no such file)'}: get the wheel that it patches, or refresh the series"
            )


def check_after(files: Mapping[str, PatchedFile], images: Mapping[str, Image], root: Path) -> None:
    """Raise PatchError, naming the file, unless the series made exactly what images.sha256 says."""
    remedy = "restore the patches, or after a change of the series run `python -m tlt_server.fork.refresh`"
    for path in sorted(files.keys() ^ images.keys()):
        which = "changes {}, which is not" if path in files else "does not change {}, which is"
        raise PatchError(f"the series {which.format(path)} listed in {root / IMAGES}: {remedy}")
    for path, file in files.items():
        if file.image.after != images[path].after:
            raise PatchError(
                f"{path} after the series has sha256 {file.image.after}, but {root / IMAGES} expects"
                f" {images[path].after}: {remedy}"
            )


def _git(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in `tree`, deaf to the user's repositories and configuration (apply.whitespace would alter lines)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {
        "GIT_CEILING_DIRECTORIES": str(tree.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    try:
        return subprocess.run(["git", *arguments], cwd=tree, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ForkError("git is not on PATH: the patches are applied with it, install it") from None


def _touched(tree: Path, patch: Patch) -> list[str]:
    """Paths that a patch names, in its order."""
    listing = _git(tree, "apply", "--numstat", "-z", str(patch.path.resolve()))
    if listing.returncode != 0:
        raise PatchError(f"{patch.path} is not a patch that git can read: {listing.stderr.strip()}")
    paths = [entry.split("\t", 2)[2] for entry in listing.stdout.split("\0") if entry]
    for path in paths:
        if not path.endswith(".py"):
            raise PatchError(f"{patch.path} changes {path}: only .py files can be marked as changed")
    return paths


def _apply(tree: Path, patch: Patch, paths: list[str]) -> None:
    def contents() -> dict[str, bytes | None]:
        return {path: (tree / path).read_bytes() if (tree / path).is_file() else None for path in paths}

    before = contents()
    applied = _git(tree, "apply", str(patch.path.resolve()))
    if applied.returncode != 0:
        raise PatchError(f"{patch.path} does not apply: {applied.stderr.strip()}")
    for path, content in contents().items():
        if content is None:
            raise PatchError(f"{patch.path} deletes {path}: a patch changes or adds files")
        if content == before[path]:
            raise PatchError(f"{patch.path} left {path} as it was: git skipped it")


# PEP 263: Python looks for an encoding in the first two lines only.
_CODING = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*[-\w.]+")


def mark(source: bytes, changed_by: Sequence[str]) -> bytes:
    """Put a comment that names `changed_by` above a Python file, below its shebang and its encoding line."""
    lines = source.splitlines(keepends=True)
    top = 1 if lines and lines[0].startswith(b"#!") else 0
    top += 1 if len(lines) > top and _CODING.match(lines[top]) else 0
    note = f"# Modified by tlt-server ({', '.join(changed_by)}): not the file that the SGLang team published.\n"
    return b"".join([*lines[:top], note.encode(), *lines[top:]])
