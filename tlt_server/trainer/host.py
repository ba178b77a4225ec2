"""What a trainer takes of its machine: its folder for itself, and signals, at which it ends between two steps."""

import fcntl
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlt_server.errors import ConfigError

NAME = "trainer.lock"
"""The kernel lets go of it when the process ends, however that ends; so it may stay."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps others out while the context lasts. Raises ConfigError: it cannot be made, or another
    trainer runs in it."""
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


log = logging.getLogger(__name__)

WITHIN_S = 15.0
"""Seconds, of which the last checkpoint takes most."""


def ended_by_signals(over: threading.Event) -> None:
    """Sets the event at SIGINT or SIGTERM. A thread is told by the interpreter, too: it ends the process where the main
    thread, whose Python may not run while it waits, has not in time."""
    told, tells = socket.socketpair()
    tells.setblocking(False)
    threading.Thread(target=_end, args=(told, tells), name="ending", daemon=True).start()
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())


def _end(told: socket.socket, tells: socket.socket) -> None:
    """tells: kept open as long as the thread lives."""
    with told, tells:
        told.recv(1)
        time.sleep(WITHIN_S)
        log.error("the trainer was told to end, and has not within %g s: it does now", WITHIN_S)
        os._exit(1)
