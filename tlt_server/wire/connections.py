"""Who is connected to a socket that we bind, and how much of our memory each may take.

libzmq bounds messages that wait by their number, and frames by their size, but not a message's frames, none of which is
handed over before the last one is here; and it takes connections as long as there are file descriptors. So a thread
hears from libzmq of each connection, asks the kernel how much has come over it, and cuts it where that is too much. A
peer that was cut wrongly is back within a second, and says all that matters again.
"""

import contextlib
import ctypes
import logging
import math
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

LOOK_EVERY = 0.05
"""Seconds, in which a few dozen MiB may come on one machine."""
FRAME_BYTES = 64
"""Of a frame beside its content, at most: its head and, encrypted, what CURVE adds."""
LARGE = 1 << 20
"""Bytes that waited of a connection that is gone, whose memory is worth giving back; `FREED_AFTER` so many seconds."""
FREED_AFTER = 1.0
BYTES_RECEIVED = 128
"""Where Linux says it in `struct tcp_info` (include/uapi/linux/tcp.h)."""


class Bounds(NamedTuple):
    """connections: at most. waiting, in_all: bytes that came and were not taken, of one connection and of all.

    prove_within: seconds until a connection must have brought a message that is one.
    """

    connections: int
    waiting: int
    in_all: int
    prove_within: float


@dataclass
class _Connection:
    """line: a descriptor of our own, for libzmq may close its own, whose number is another one's then."""

    line: socket.socket
    since: float = field(default_factory=time.monotonic)
    taken: int = 0
    is_proved: bool = False

    @property
    def waiting(self) -> int:
        """Bytes; of a connection of this machine's file system, where its owner alone connects, none are counted."""
        if self.line.family == socket.AF_UNIX:
            return 0
        info = self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        received: int = struct.unpack_from("Q", info, BYTES_RECEIVED)[0] if len(info) >= BYTES_RECEIVED + 8 else 0
        return max(received - self.taken, 0)

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # the peer has
            self.line.shutdown(socket.SHUT_RDWR)


class Doorkeeper:
    """Of one socket, made before it is bound and closed before it is; `took` is for the thread that reads it.

    name: of the socket, for people.

    Attributes:
        cut: connections until now.
    """

    def __init__(self, bound: "zmq.Socket[bytes]", bounds: Bounds, name: str) -> None:
        self._bound, self._bounds, self._name = bound, bounds, name
        self._open: dict[int, _Connection] = {}
        self._lock = threading.Lock()
        self._trim_at = math.inf
        self.cut = 0
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._events = bound.get_monitor_socket(events)
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)
        self._thread.start()

    def took(self, frames: "list[zmq.Frame]", *, proves: bool) -> None:
        """A whole message was read. proves: that its peer is one."""
        size = sum(len(frame) + FRAME_BYTES for frame in frames)
        with self._lock:
            if (known := self._open.get(_descriptor(frames[-1]))) is not None:
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
                    if said["event"] == zmq.EVENT_MONITOR_STOPPED:
                        self._forget(*self._open)
                        return
                    self._note(said["event"], said["value"])
                self._look()

    def _note(self, event: int, descriptor: int) -> None:
        self._forget(descriptor)
        if event == zmq.EVENT_ACCEPTED and (line := _connection(descriptor)) is not None:
            with self._lock:
                self._open[descriptor] = _Connection(line)
            if len(self._open) > self._bounds.connections:
                self._cut(self._one_too_many(), f"more than {self._bounds.connections} connections")

    def _forget(self, *descriptors: int) -> None:
        with self._lock:
            for each in descriptors:
                if (gone := self._open.pop(each, None)) is not None:
                    if gone.waiting > LARGE:
                        self._trim_at = time.monotonic() + FREED_AFTER
                    gone.line.close()

    def _one_too_many(self) -> int:
        """The oldest that has proved nothing; else the newest."""
        unproved = [descriptor for descriptor, each in self._open.items() if not each.is_proved]
        return unproved[0] if unproved else list(self._open)[-1]

    def _look(self) -> None:
        now = time.monotonic()
        if now > self._trim_at:
            self._trim_at = math.inf
            _give_memory_back()
        with self._lock:
            waiting = {descriptor: each.waiting for descriptor, each in self._open.items()}
            late = [
                descriptor
                for descriptor, each in self._open.items()
                if not each.is_proved and now - each.since > self._bounds.prove_within
            ]
        for descriptor in late:
            self._cut(descriptor, f"no message that is one within {self._bounds.prove_within:g} s")
        total = sum(waiting.values())
        for descriptor, size in sorted(waiting.items(), key=lambda item: -item[1]):
            if size <= self._bounds.waiting and total <= self._bounds.in_all:
                break
            self._cut(descriptor, f"{size} bytes of it wait to be read, {total} in all")
            total -= size

    def _cut(self, descriptor: int, why: str) -> None:
        if (known := self._open.get(descriptor)) is None:
            return
        known.cut()
        self._forget(descriptor)
        self.cut += 1
        if self.cut == 1:
            log.warning("a connection to %s is cut: %s; further ones are only counted", self._name, why)


def _give_memory_back() -> None:
    """What was freed, to the system: glibc keeps a peer's tens of MiB wherever a few bytes after them are in use."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection that it came over; -1 where libzmq does not know, for the peer was gone before it asked."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError as error:
        if error.errno != zmq.EINVAL:
            raise
        return -1


def _connection(descriptor: int) -> socket.socket | None:
    """One's own descriptor of it; None where it is gone, and the number may be anything's."""
    try:
        line = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        line.getpeername()
    except OSError:
        line.close()
        return None
    return line
