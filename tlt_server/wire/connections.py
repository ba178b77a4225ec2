"""Who is connected to a socket that we bind, and how much of our memory each may take.

libzmq bounds waiting messages by number and frames by size, but not a message's frames, none of which is handed over
before the last is here, nor connections. So a thread hears of each from libzmq, asks the kernel how much came over it,
and cuts it where that is too much. One that was cut wrongly is back within a second, and says all that matters again.
"""

import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

LOOK_EVERY = 0.05
"""Seconds, in which a few dozen MiB may come on one machine."""
FRAME_BYTES = 64
"""Of a frame beside its content, at most: its head and, encrypted, what CURVE adds."""
FREED_AFTER = 1.0
"""Seconds after a connection is gone, until what it took is given back to the system."""
BYTES_RECEIVED = 128
"""Offset in Linux's `struct tcp_info` (include/uapi/linux/tcp.h)."""


class Bounds(NamedTuple):
    """waiting, in_all: bytes that came and were not taken, of one connection and of all. prove_within: seconds until
    one must have brought a message that can be read."""

    connections: int
    waiting: int
    in_all: int
    prove_within: float


@dataclass
class _Connection:
    """line: a descriptor of our own, for libzmq may close its own, whose number is another one's then."""

    line: socket.socket
    since: float
    taken: int = 0
    is_proved: bool = False

    @property
    def waiting(self) -> int:
        """Bytes; none are counted over ipc, where the socket's owner alone connects."""
        if self.line.family == socket.AF_UNIX:
            return 0
        info = self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        received: int = struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
        return max(received - self.taken, 0)


class Doorkeeper:
    """Of one socket, made before it is bound and closed before it is. name: for the log.

    cut: connections until now.
    """

    def __init__(self, bound: "zmq.Socket[bytes]", bounds: Bounds, name: str) -> None:
        self._bound, self._bounds, self._name = bound, bounds, name
        self._open: dict[int, _Connection] = {}
        self._lock = threading.Lock()
        self._gone_at: float | None = None
        self.cut = 0
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._events = bound.get_monitor_socket(events)
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)
        self._thread.start()

    def took(self, frames: "list[zmq.Frame]", *, proves: bool) -> None:
        """For the thread that reads the socket: a whole message was read. proves: that its peer is one."""
        size = sum(len(frame) + FRAME_BYTES for frame in frames)
        with self._lock, contextlib.suppress(zmq.ZMQError):  # the peer was gone before libzmq asked who it is
            if (known := self._open.get(int(frames[-1].get(zmq.SRCFD)))) is not None:
                known.taken += size
                known.is_proved |= proves

    def close(self) -> None:
        self._bound.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        with self._events:
            while True:
                while self._events.poll(int(LOOK_EVERY * 1000)):
                    said = recv_monitor_message(self._events)
                    with self._lock:
                        self._forget(said["value"])
                        if said["event"] == zmq.EVENT_MONITOR_STOPPED:
                            self._forget(*self._open)
                            return
                        if said["event"] == zmq.EVENT_ACCEPTED:
                            self._accept(said["value"])
                with self._lock:
                    self._look(time.monotonic())

    def _accept(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self._open[descriptor] = _Connection(socket.socket(fileno=os.dup(descriptor)), time.monotonic())
        if len(self._open) > self._bounds.connections:
            oldest = next(number for number, each in self._open.items() if not each.is_proved)  # this one is not
            self._cut(oldest, f"more than {self._bounds.connections} connections")

    def _look(self, now: float) -> None:
        if self._gone_at is not None and now - self._gone_at > FREED_AFTER:
            self._gone_at = None
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps a peer's tens of MiB wherever a few bytes after are in use
        waiting = {descriptor: each.waiting for descriptor, each in self._open.items()}
        total = sum(waiting.values())
        for descriptor, size in sorted(waiting.items(), key=lambda item: -item[1]):
            each = self._open[descriptor]
            if size > self._bounds.waiting or total > self._bounds.in_all:
                self._cut(descriptor, f"{size} bytes of it wait to be read, {total} in all")
                total -= size
            elif not each.is_proved and now - each.since > self._bounds.prove_within:
                self._cut(descriptor, f"no message that is one within {self._bounds.prove_within:g} s")

    def _cut(self, descriptor: int, why: str) -> None:
        self.cut += 1
        if self.cut == 1:
            log.warning("a connection to %s is cut: %s; further ones are only counted", self._name, why)
        with contextlib.suppress(OSError):  # the peer has
            self._open[descriptor].line.shutdown(socket.SHUT_RDWR)
        self._forget(descriptor)

    def _forget(self, *descriptors: int) -> None:
        for gone in [self._open.pop(each) for each in descriptors if each in self._open]:
            gone.line.close()
            self._gone_at = time.monotonic()
