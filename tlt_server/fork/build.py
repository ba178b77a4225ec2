"""Pristine wheel + patches -> our wheel. Reads top to bottom as the pipeline that it is."""

import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from tlt_server.errors import ForkError
from tlt_server.fork.metadata import fork_version, rewrite_metadata, rewrite_version
from tlt_server.fork.patching import apply_series, check_after, check_before, mark
from tlt_server.fork.pristine import SGLANG, Host, Release, fetch, require_host, require_python, this_python
from tlt_server.fork.series import Image, load_images, load_series, patches_dir, sha256
from tlt_server.fork.wheelfile import Entry, write_wheel

VERSION_FILE = "sglang/_version.py"


@dataclass(frozen=True)
class Built:
    """A finished wheel; `fresh` is False where an earlier build had made it."""

    wheel: Path
    version: str
    fresh: bool


def build_fork(
    out: Path,
    python: str | None = None,
    wheel: Path | None = None,
    *,
    root: Path | None = None,
    release: Release = SGLANG,
) -> Built:
    """Make the fork's wheel for `python` ("3.11"; the running one) in `out`, of a local pristine `wheel` or a download.
    Raises ForkError or PatchError, and then leaves nothing behind."""
    require_host(Host.here())
    python = python or this_python()
    require_python(python)
    series, images = load_series(root), load_images(root)
    version = fork_version(series)
    target = out / release.wheel_name(python, version)
    if is_fork_wheel(target, images):
        return Built(target, version, fresh=False)
    with tempfile.TemporaryDirectory(prefix="tlt-fork-") as scratch:
        pristine = fetch(release, python, wheel, Path(scratch))
        with ZipFile(pristine) as archive:
            check_before(archive, images)
            files = apply_series(series, archive)
            check_after(files, images, series.root)
            numbered = rewrite_version(archive.read(VERSION_FILE).decode(), version).encode()
            changed = {path: file.after for path, file in files.items()}
            changed[VERSION_FILE] = mark(numbered, ["its version"])
            out.mkdir(parents=True, exist_ok=True)
            write_wheel(target, f"sglang-{version}.dist-info", _entries(archive, changed, release, version))
    return Built(target, version, fresh=True)


def is_fork_wheel(wheel: Path, images: Mapping[str, Image]) -> bool:
    """Whether `wheel` is a whole wheel with every changed file as `images` has it."""
    try:
        with ZipFile(wheel) as archive:
            names = set(archive.namelist())
            return archive.testzip() is None and all(
                path in names and sha256(archive.read(path)) == image.after for path, image in images.items()
            )
    except (FileNotFoundError, BadZipFile, EOFError, zlib.error):
        return False


def notice() -> bytes:
    """Our NOTICE, which lies beside the patches. Raises ForkError: it is missing."""
    path = patches_dir().parent / "NOTICE"
    if not path.is_file():
        raise ForkError(f"{path} is missing: install tlt-server again")
    return path.read_bytes()


def _entries(archive: ZipFile, changed: Mapping[str, bytes], release: Release, version: str) -> Iterator[Entry]:
    """Every file of the fork but its RECORD."""
    upstream, ours = f"sglang-{release.version}.dist-info", f"sglang-{version}.dist-info"
    for info in archive.infolist():
        if info.is_dir() or info.filename == f"{upstream}/RECORD" or info.filename in changed:
            continue
        content = archive.read(info)
        if info.filename == f"{upstream}/METADATA":
            content = rewrite_metadata(content.decode(), version).encode()
        path = info.filename.replace(f"{upstream}/", f"{ours}/", 1)
        yield Entry(path, content, executable=bool(info.external_attr >> 16 & 0o111))
    for path, content in changed.items():
        yield Entry(path, content)
    yield Entry(f"{ours}/licenses/NOTICE", notice())
