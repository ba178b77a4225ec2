"""Features taken into the buffer as they arrive, in a thread of its own: a step of training is no wait for them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.inbox import Inbox
from tlt_server.wire.sockets import Inlet

QUIET_S = 0.05
"""Until it looks whether it is to end, while nothing arrives."""


class Intake:
    """From a link into a buffer. While it is open, `inlet` and `inbox` are its thread's, but for their counts."""

    def __init__(self, inlet: Inlet, inbox: Inbox, buffer: Buffer) -> None:
        self._inlet, self._inbox, self._buffer = inlet, inbox, buffer
        self._over, self._came = threading.Event(), threading.Event()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Raises what has ended the thread, if it is not the end of this."""
        with ThreadPoolExecutor(1, "features") as pool:
            self._running = pool.submit(self._run)
            try:
                yield
            finally:
                self._over.set()
            self._running.result()

    def check(self) -> None:
        """Raises what has ended the thread."""
        if self._running.done():
            self._running.result()

    def wait(self, seconds: float) -> None:
        """Returns when features have come, or after so many seconds."""
        self._came.wait(seconds)
        self._came.clear()

    def _run(self) -> None:
        while not self._over.is_set():
            self._inlet.wait(QUIET_S)
            for feature in self._inbox.read():
                self._buffer.add(feature)
                self._came.set()
