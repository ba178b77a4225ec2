"""Regular files, of a size known before they are read: a path that others name or write may lead to anything.

A pipe would be waited for, a device has no end, and a file may be larger than memory. Errors are OSErrors, whose
`strerror` says what is wrong.
"""

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_JSON = 16 << 20
"""Bytes of a config.json, or of facts; a hundred times what any has."""


@contextmanager
def regular(path: Path, most: int | None = None) -> Iterator[tuple[io.FileIO, int]]:
    """The file, unbuffered, and its size. OSError: it cannot be opened, is not regular, or is larger than `most`."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path with a NUL in it", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, where {most} are the most", str(path))
        yield io.FileIO(descriptor, closefd=False), found.st_size
    finally:
        os.close(descriptor)


def fill(file: io.FileIO, memory: memoryview) -> None:
    """Reads until the memory is full. OSError: the file ends before."""
    done = 0
    while done < len(memory):
        if not (count := file.readinto(memory[done:])):
            raise OSError(errno.EIO, "cut short")
        done += count


def read(path: Path, most: int = MOST_JSON) -> bytes:
    """All of it, in one piece of memory that is read into while other threads run. OSError: as `regular`, or it grew
    shorter meanwhile."""
    parts: list[bytes] = []
    with regular(path, most) as (file, size):
        while (left := size - sum(map(len, parts))) > 0:  # Linux reads 2 GiB at once at most
            parts.append(file.read(left))
            if not parts[-1]:
                raise OSError(errno.EIO, "cut short")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. OSError: as `read`. ValueError: it holds none."""
    try:
        found = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
