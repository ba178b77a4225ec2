"""For those who write patches: `python -m tlt_server.fork.refresh [WHEEL]` writes patches/images.sha256 anew.

Without WHEEL the pristine wheel comes from the package index. Either wheel of the release gives the same hashes, since
the two differ in compiled files only.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

from tlt_server.errors import ForkError
from tlt_server.fork.patching import PatchedFile, apply_series
from tlt_server.fork.pristine import SGLANG, Release, fetch
from tlt_server.fork.series import IMAGES, load_series


def refresh(
    root: Path | None = None, wheel: Path | None = None, release: Release = SGLANG
) -> Mapping[str, PatchedFile]:
    """Apply the series under `root` to the pristine wheel, write images.sha256 from what comes out, and return that."""
    series = load_series(root)
    with tempfile.TemporaryDirectory(prefix="tlt-fork-") as scratch:
        pristine = fetch(release, None, wheel, Path(scratch))
        with ZipFile(pristine) as archive:
            files = apply_series(series, archive)
    lines = ["# sha256 before, sha256 after, path: written by `python -m tlt_server.fork.refresh`"]
    lines += [f"{file.image.before or '-'} {file.image.after} {path}" for path, file in files.items()]
    (series.root / IMAGES).write_text("\n".join(lines) + "\n")
    return files


def main() -> int:
    """The command above; exits as the other commands do, with the error's message alone."""
    try:
        files = refresh(wheel=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except ForkError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write("".join(f"{path}\n" for path in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
