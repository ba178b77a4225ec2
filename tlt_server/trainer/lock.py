"""A trainer's folder is its own: two that write to one would mix their checkpoints, and their drafters' versions."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlt_server.errors import ConfigError

NAME = "trainer.lock"
"""The kernel lets go of it when the process ends, however that ends; so it may stay."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps others out while the context lasts.

    Raises:
        ConfigError: it cannot be made, or another trainer runs in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"folder {folder}: {error.strerror}. Name another one by --folder") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"folder {folder} is that of a running trainer, process {holder}: end it, or name another one by --folder"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
