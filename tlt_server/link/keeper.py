"""Keeps a process alive beside a server, and ends it with the server."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
STEADY = 60.0
END_WITHIN = 10.0
"""Seconds: before a process that died is started anew, doubled each time up to a most; of life, after which the pause
is the first one again; for an orderly end."""

SPAWN = get_context("spawn")


class Keeper:
    """Inside a `with`, `main(pipe, *arguments)` runs in a process that outlives its parent: a pipe connects the two.

    That is all they have of each other: one sees the other's death by the pipe's end, and what this side sends is the
    word to end. A thread of this process waits for either, and does nothing else.
    """

    def __init__(self, main: Callable[..., None], *arguments: Any, first_pause: float = FIRST_PAUSE) -> None:
        self._main, self._arguments, self._first_pause = main, arguments, first_pause
        self._over, self._end = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._keep, name="link-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.send_bytes(b"")  # closed, it may still be open in a server's processes, which are forks of this one
        self._end.close()
        self._thread.join()
        self._over.close()

    def _keep(self) -> None:
        pause = self._first_pause
        while True:
            began = time.monotonic()
            with self._started() as pipe:
                if self._over in wait([pipe, self._over]):
                    _end(pipe)
                    return
            lived = time.monotonic() - began
            pause = self._first_pause if lived > STEADY else pause
            log.warning("the link to the drafter trainer died after %.0f s; it is started anew in %.0f s", lived, pause)
            if self._over.poll(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE)

    def _started(self) -> Connection:
        ours, theirs = SPAWN.Pipe()
        starter = SPAWN.Process(target=self._main, args=(theirs, *self._arguments))
        starter.start()
        theirs.close()
        starter.join()
        return ours


def _end(pipe: Connection) -> None:
    with contextlib.suppress(ConnectionError):
        pipe.send_bytes(b"")
    if not pipe.poll(END_WITHIN):
        log.warning("the link to the drafter trainer has not ended after %.0f s; it will when it can", END_WITHIN)
