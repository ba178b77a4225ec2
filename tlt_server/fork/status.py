"""Which SGLang is installed: read from its metadata and its changed files, without importing it."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tlt_server.errors import ForkError
from tlt_server.fork.metadata import fork_version
from tlt_server.fork.series import load_images, load_series, sha256

REMEDY = "run `tlt-server fork install`"


class Verdict(StrEnum):
    """What an environment holds under the name sglang."""

    OURS = "ours"
    MISSING = "missing"
    UPSTREAM = "upstream"
    OTHER_SERIES = "other series"
    ALTERED = "altered"
    SHADOWED = "shadowed"


@dataclass(frozen=True)
class ForkStatus:
    """The verdict on one environment; `message` is one line, with the remedy where there is something to mend."""

    verdict: Verdict
    installed: str | None
    message: str

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OURS


def check(path: Sequence[str] | None = None, root: Path | None = None) -> ForkStatus:
    """Compare the sglang found along `path` (an environment's sys.path, by default this one's) with our series."""
    importlib.invalidate_caches()  # an installer may have run since this process last looked
    path = sys.path if path is None else path
    expected = fork_version(load_series(root))
    installed = next(iter(distributions(name="sglang", path=list(path))), None)
    verdict, problem = _verdict(installed, expected, path, root)
    message = f"SGLang {expected} is installed" if verdict is Verdict.OURS else f"{problem}: {REMEDY}"
    return ForkStatus(verdict, installed.version if installed else None, message)


def require_fork() -> ForkStatus:
    """Raise ForkError, whose message names the command that mends it, unless this environment has the fork intact."""
    status = check()
    if not status.ok:
        raise ForkError(status.message)
    return status


def _verdict(
    installed: Distribution | None, expected: str, path: Sequence[str], root: Path | None
) -> tuple[Verdict, str]:
    """The verdict, and what is wrong in words."""
    if installed is None:
        return Verdict.MISSING, "SGLang is not installed, tlt-server needs its fork of it"
    version = installed.version
    if "+tlt." not in version:
        return Verdict.UPSTREAM, f"SGLang {version} is not tlt-server's fork, {expected} is"
    if version != expected:
        return Verdict.OTHER_SERIES, f"SGLang {version} was built from other patches than this tlt-server's {expected}"
    for name, image in load_images(root).items():
        file = Path(str(installed.locate_file(name)))
        if not file.is_file() or sha256(file.read_bytes()) != image.after:
            return Verdict.ALTERED, f"{file} is not the file that {expected} installed"
    # A source checkout on PYTHONPATH is imported instead of what the metadata speaks of.
    ours = Path(str(installed.locate_file("sglang/__init__.py")))
    spec = PathFinder.find_spec("sglang", path)
    if spec is None or spec.origin is None or not ours.samefile(spec.origin):
        found = spec.origin if spec else None
        return Verdict.SHADOWED, f"`import sglang` finds {found} before the fork's {ours} (take it off sys.path), or"
    return Verdict.OURS, ""
