"""Writing a wheel that comes out the same, byte for byte, from the same files."""

import base64
import contextlib
import csv
import hashlib
import io
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

# The first moment that a zip can name.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Entry:
    """One file of a wheel."""

    path: str
    content: bytes
    executable: bool = False


def write_wheel(target: Path, dist_info: str, entries: Iterable[Entry]) -> None:
    """Write `entries` and the RECORD of `dist_info` to `target`; until it is whole, `target` is as it was before."""
    entries = sorted(entries, key=lambda entry: entry.path)
    record = Entry(f"{dist_info}/RECORD", _record(entries, f"{dist_info}/RECORD"))
    handle, name = tempfile.mkstemp(prefix=".", suffix=".partial", dir=target.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream, ZipFile(stream, "w", ZIP_DEFLATED) as archive:
            for entry in [*entries, record]:
                info = ZipInfo(entry.path, _EPOCH)
                info.compress_type, info.create_system = ZIP_DEFLATED, 3
                info.external_attr = (0o100755 if entry.executable else 0o100644) << 16
                archive.writestr(info, entry.content)
        partial.chmod(0o644)
        partial.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _record(entries: Iterable[Entry], own_path: str) -> bytes:
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for entry in entries:
        digest = base64.urlsafe_b64encode(hashlib.sha256(entry.content).digest()).rstrip(b"=").decode()
        writer.writerow([entry.path, f"sha256={digest}", len(entry.content)])
    writer.writerow([own_path, "", ""])
    return rows.getvalue().encode()
