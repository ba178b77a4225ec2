"""The sockets; beside them, only addresses.py and connections.py touch zmq.

| link     | sockets                                        | what may be lost                                   |
|----------|------------------------------------------------|----------------------------------------------------|
| control  | DEALER, server connects; ROUTER, trainer binds | nothing that matters: it is said again (see wire/) |
| features | PUSH, server connects; PULL, trainer binds     | everything: a server drops what cannot be sent     |

Sending never blocks. A server that is slow asks for fewer chunks; the high-water mark only bounds what a peer that does
not read can make us hold.
"""

import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq
from msgspec.msgpack import Decoder
from zmq.auth.thread import ThreadAuthenticator

from tlt_server.errors import ConfigError, WireError
from tlt_server.wire.addresses import CurveKeys, check_address, secure
from tlt_server.wire.connections import Bounds, Doorkeeper
from tlt_server.wire.messages import (
    MAX_CHUNK_BYTES,
    MAX_CHUNKS_WANTED,
    MAX_DIGESTS,
    Buffer,
    Message,
    Rejected,
    decode,
    encode,
)

log = logging.getLogger(__name__)

# libzmq learns that a queue was read only half a queue at a time, so half of it must hold the chunks that are wanted at
# once, and as many that are asked for again. Beyond the mark a message is dropped; what was wanted is asked for again.
HIGH_WATER_MARK = 4 * MAX_CHUNKS_WANTED

FEATURES_WAITING = 64
"""Messages of features that wait for a trainer that is in the middle of a step, a few MiB each."""

FEATURES_UNSENT = 4
"""Of those, on the server's side."""

MAX_FEATURES_BYTES = 32 << 20
"""Of a message's largest frame: a server sends a few MiB, and a parcel of 16 MiB more at most."""

MAX_WORD_BYTES = 64 << 10
"""Of a frame that a server sends on the control link."""

MAX_CHUNK_FRAME_BYTES = max(MAX_CHUNK_BYTES, MAX_DIGESTS) + MAX_WORD_BYTES
"""Of one that the trainer sends."""

CONTROL = Bounds(connections=128, waiting=16 << 20, in_all=256 << 20, prove_within=10.0)
FEATURES = Bounds(
    connections=128, waiting=512 << 20, in_all=2 << 30, prove_within=math.inf
)  # a quiet server sends none

HANDSHAKE_WITHIN = 5.0
"""Seconds, until a peer has shown that it speaks ZMTP and, where they are asked for, its keys."""

MAX_PEERS_COUNTED = 1024
OTHERS = b"others"
"""Whom messages that cannot be read are counted for, once so many peers have sent some."""

TRAINER = b"the trainer"
"""The one peer of a side that connects."""


class Link:
    """One end of a link, for one thread.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`; of a host other than loopback only with `curve`.
        reads: the messages that arrive here.
        name: connects, and is known to the peer as `NAME/TOKEN`; None: binds.
        bounds: of those who connect, where it binds.

    Attributes:
        rejected: messages dropped because they could not be read or used, by peer, as far as there are not too many.
        read: messages until now, of any kind.

    Raises:
        ConfigError: the address or a key cannot be used.
    """

    def __init__(
        self,
        address: str,
        reads: Decoder[Message],
        name: str | None = None,
        curve: CurveKeys | None = None,
        bounds: Bounds = CONTROL,
    ) -> None:
        check_address(address, curve)
        self.rejected: Counter[bytes] = Counter()
        self.read = 0
        self._rejected_us: set[bytes] = set()
        self._reads = reads
        self._binds = name is None
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER if self._binds else zmq.DEALER)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._door: Doorkeeper | None = None
        try:
            self._configure(name)
            if curve is not None:
                secure(self._socket, curve, self._authenticator if self._binds else None)
            if self._binds:
                self._door = Doorkeeper(self._socket, bounds, address)
                _bind(self._socket, address)
            else:
                self._socket.connect(address)
        except (zmq.ZMQError, OSError, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(f"link {address}: {error}") from error

    @property
    def address(self) -> str:
        """Where this end is bound or connected; a port that the system chose is in it."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def cut(self) -> int:
        """Connections until now, for they asked too much."""
        return self._door.cut if self._door is not None else 0

    def watch(self, fileno: int) -> None:
        """Makes `wait` return when that can be read, too."""
        self._poller.register(fileno, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Returns when there may be something to read, or after so many seconds."""
        self._poller.poll(int(seconds * 1000))

    def send(self, message: Message, payload: Buffer | None = None, to: bytes = TRAINER) -> bool:
        """Sends without blocking, the payload without a copy; False if the peer is away, or does not read."""
        frames: list[Any] = [to] if self._binds else []
        frames += [encode(message)] if payload is None else [encode(message), payload]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                raise
            return False
        return True

    def receive(self) -> tuple[bytes, Message, Buffer] | None:
        """Who sent, what, and its payload; None if there is nothing, or nothing that can be read."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.read += 1
        peer = frames.pop(0).bytes if self._binds else TRAINER
        try:
            message, payload = decode([frame.buffer for frame in frames], self._reads)
        except WireError as error:
            self._took(frames, proves=False)
            self.reject(peer, str(error))
            return None
        self._took(frames, proves=True)
        if not isinstance(message, Rejected):
            return peer, message, payload
        if peer not in self._rejected_us and len(self._rejected_us) < MAX_PEERS_COUNTED:
            self._rejected_us.add(peer)
            log.warning("%r rejects what we send: %r", peer, message.reason)
        return None

    def _took(self, frames: "list[zmq.Frame]", *, proves: bool) -> None:
        if self._door is not None and frames:  # a ROUTER is given none where a peer sends none but its name
            self._door.took(frames, proves=proves)

    def reject(self, peer: bytes, reason: str) -> None:
        """Counts a message that could not be read or used, logs a peer's first, and tells the peer."""
        known = peer if peer in self.rejected or len(self.rejected) < MAX_PEERS_COUNTED else OTHERS
        self.rejected[known] += 1
        if self.rejected[known] == 1:
            log.warning("dropped a message of %r: %s; further ones are only counted", peer, reason)
        self.send(Rejected(reason=reason), to=peer)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _configure(self, name: str | None) -> None:
        socket = self._socket
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
        socket.maxmsgsize = MAX_WORD_BYTES if self._binds else MAX_CHUNK_FRAME_BYTES
        socket.handshake_ivl = int(HANDSHAKE_WITHIN * 1000)
        _notice_a_cut(socket)
        if name is None:
            socket.router_mandatory = True  # else what cannot be sent is dropped without a word
            socket.router_handover = True  # a peer may be back before its old connection is given up
        else:
            socket.routing_id = f"{name}/{secrets.token_hex(4)}".encode()
            socket.immediate = True  # while nobody listens, sending fails; else it would queue what is stale by then
            socket.reconnect_ivl_max = 1000


class Inlet:
    """The trainer's end of the features link, for one thread.

    Args:
        address: to bind, as for `Link`.
        bounds: of those who connect.

    Attributes:
        read: messages until now, of any kind.

    Raises:
        ConfigError: the address or a key cannot be used.
    """

    def __init__(self, address: str, curve: CurveKeys | None = None, bounds: Bounds = FEATURES) -> None:
        check_address(address, curve)
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.rcvhwm, self._socket.maxmsgsize = FEATURES_WAITING, MAX_FEATURES_BYTES
        self._socket.handshake_ivl = int(HANDSHAKE_WITHIN * 1000)
        self.read = 0
        self._door: Doorkeeper | None = None
        try:
            if curve is not None:
                secure(self._socket, curve, self._authenticator)
            self._door = Doorkeeper(self._socket, bounds, address)
            _bind(self._socket, address)
        except (zmq.ZMQError, OSError, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(f"link {address}: {error}") from error

    @property
    def address(self) -> str:
        """Where it is bound; a port that the system chose is in it."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def cut(self) -> int:
        """Connections until now, for they asked too much."""
        return self._door.cut if self._door is not None else 0

    def wait(self, seconds: float) -> None:
        """Returns when there is something to read, or after so many seconds."""
        self._socket.poll(int(seconds * 1000))

    def receive(self) -> list[Buffer] | None:
        """The frames of the next message; None if there is none."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.read += 1
        if self._door is not None:
            self._door.took(frames, proves=True)
        return [frame.buffer for frame in frames]

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()


class Outlet:
    """A server's end of the features link, for one thread.

    Args:
        address: of the trainer's `Inlet`, as for `Link`.

    Raises:
        ConfigError: the address or a key cannot be used.
    """

    def __init__(self, address: str, curve: CurveKeys | None = None) -> None:
        check_address(address, curve)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._socket.sndhwm, self._socket.linger = FEATURES_UNSENT, 0
        self._socket.immediate = True  # while nobody listens, sending fails; else it would queue what is stale by then
        self._socket.reconnect_ivl_max = 1000
        _notice_a_cut(self._socket)
        try:
            if curve is not None:
                secure(self._socket, curve)
            self._socket.connect(address)
        except (zmq.ZMQError, OSError, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(f"link {address}: {error}") from error

    @property
    def ready(self) -> bool:
        """Whether a trainer is there that reads."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Sends without blocking and without a copy; False if the trainer is away, or does not read."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    """What is bound in the file system, its owner alone may connect to."""
    before = os.umask(0o077)
    try:
        socket.bind(address)
    finally:
        os.umask(before)


def _notice_a_cut(socket: "zmq.Socket[bytes]") -> None:
    """Has the kernel give up a TCP connection that is silent for ten seconds, or answers nothing for five.

    Not ZMTP's heartbeats: where one is due on a connection whose end libzmq has seen, but not read to, because a queue
    was full, libzmq 4.3.5 aborts the process (zeromq/libzmq issues 3937 and 4364, both open).
    """
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, 5, 1  # seconds
    socket.tcp_keepalive_cnt = 5
    socket.tcp_maxrt = 5000  # ms
