"""Links as processes: how a test finds them, and what stands for a server that has one."""

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tests.wire.ends import MODEL
from tlt_server.link.process import LinkSettings, kept, run

MARK = "TLT_TEST_LINK"
"""An environment variable that a server's processes inherit, the link among them, though it is no child of theirs."""


def links(mark: str) -> list[psutil.Process]:
    """The links of servers that were started with this mark: spawned, and at the head of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            spawned = process.environ().get(MARK) == mark and "spawn_main" in " ".join(process.cmdline())
            if spawned and os.getsid(process.pid) == process.pid:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def until(done: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def idle(folder: Path) -> LinkSettings:
    """Of a link whose server never answers."""
    return LinkSettings("http://127.0.0.1:9", None, None, "ipc://nobody", "test:9", None, MODEL, folder)


def server_process(folder: Path) -> None:
    """A server that has a link, and serves nothing."""
    with kept(run, idle(folder)):
        time.sleep(60)


def dies(_: Connection, log: Path) -> None:
    with log.open("a") as file:
        file.write(f"{time.monotonic()}\n")
