"""The patch series: which files stand in patches/, in which order, and what they say of themselves.

patches/series           names of the patches, one a line, in the order they apply; `#` starts a comment
patches/NNNN-name.patch  header (`Subject:`, `Why:`, `Seam:`, `Test:`), then a diff with a/ and b/ prefixes
patches/images.sha256    `before after path` for every file that the series changes; `-` before a new file
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tlt_server.errors import PatchError

SERIES = "series"
IMAGES = "images.sha256"
_KNOWN = {SERIES, IMAGES, "README.md", "OVERRIDES.md"}
_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
_IMAGE = re.compile(r"(-|[0-9a-f]{64}) ([0-9a-f]{64}) (\S+\.py)")


@dataclass(frozen=True)
class Patch:
    """One patch of the series, as it lies on disk."""

    path: Path
    content: bytes

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Image:
    """sha256 (hex) of one file in the pristine wheel, None where the series adds it, and in the fork."""

    before: str | None
    after: str


@dataclass(frozen=True)
class Series:
    """The patches in the order they apply."""

    root: Path
    patches: tuple[Patch, ...]


def patches_dir() -> Path:
    """Where the patches lie: beside this file in an installed wheel, at the top of the repository in a checkout."""
    packaged = Path(__file__).parent / "patches"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "patches"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def load_series(root: Path | None = None) -> Series:
    """Read the series under `root`, by default ours. Raises PatchError for a patch that is listed twice or not there,
    and for any file that the series does not explain."""
    root = root or patches_dir()
    names = _listed(root / SERIES)
    for name in names:
        if not _NAME.fullmatch(name):
            raise PatchError(f"{root / SERIES} lists {name!r}: a patch is called NNNN-words.patch")
        if names.count(name) > 1:
            raise PatchError(f"{root / SERIES} lists {name} twice: keep one")
        if not (root / name).is_file():
            raise PatchError(f"{root / name} is missing: restore it, or take it out of {root / SERIES}")
    for entry in sorted(root.iterdir()):
        if entry.name not in _KNOWN | set(names):
            raise PatchError(f"{entry} belongs to no series: list it in {root / SERIES}, or delete it")
    return Series(root, tuple(Patch(root / name, (root / name).read_bytes()) for name in names))


def load_images(root: Path | None = None) -> Mapping[str, Image]:
    """Read images.sha256: path in the wheel -> its hashes. Raises PatchError for a line of another form."""
    path = (root or patches_dir()) / IMAGES
    images: dict[str, Image] = {}
    for line in _listed(path):
        match = _IMAGE.fullmatch(line)
        if match is None or match[3] in images:
            raise PatchError(f"{path}: {line!r} is not `before after path`, or its path is listed twice")
        images[match[3]] = Image(None if match[1] == "-" else match[1], match[2])
    return images


def _listed(path: Path) -> list[str]:
    """Lines of a list file, without comments and blank lines."""
    if not path.is_file():
        raise PatchError(f"{path} is missing: install tlt-server again, or restore it from its repository")
    lines = (line.split("#", 1)[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
