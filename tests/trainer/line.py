"""A line between a server and its trainer that can be slow, silent or cut: a relay of TCP and unix sockets."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

PIECE = 1 << 14


class Line:
    """Inside a `with`, whoever connects to `address` is connected to the unix socket `to`.

    Attributes:
        carried: bytes to the side that connected, since the line was made.
        rate: of those, bytes a second at most; 0: no bound.
    """

    def __init__(self, to: str) -> None:
        self._to, self._over, self._ends = to, threading.Event(), set[socket.socket]()
        self._flows, self._is_cut, self._fault = threading.Event(), False, (-1, self.cut)
        self._flows.set()
        self.carried, self.rate = 0, 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._listening.getsockname())

    def __enter__(self) -> "Line":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._flows.set()
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Both sides see their connections end, and new ones too."""
        self._is_cut = True
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Connections stand, and nothing comes through."""
        self._flows.clear()

    def after(self, nbytes: int, fault: Callable[[], None]) -> None:
        """Calls `fault` once so many bytes more were carried."""
        self._fault = self.carried + nbytes, fault

    def restore(self) -> None:
        self._is_cut = False
        self._flows.set()

    @property
    def is_whole(self) -> bool:
        return self._flows.is_set() and not self._is_cut

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                if self._is_cut:
                    raise ConnectionRefusedError
                far.connect(self._to)
            except OSError:  # nobody listens there now
                near.close()
                far.close()
                continue
            self._ends |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink, sink is near), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                self._flows.wait()
                sink.sendall(piece)
                if is_back:
                    self._count(len(piece))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.discard(source)
        source.close()

    def _count(self, nbytes: int) -> None:
        self.carried += nbytes
        due, fault = self._fault
        if 0 <= due <= self.carried:
            self._fault = -1, fault
            fault()
        if self.rate:
            time.sleep(nbytes / self.rate)
