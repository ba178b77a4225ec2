"""The ZMQ sockets; beside this module only connections.py touches zmq.

| link     | sockets                                        | what may be lost                                         |
|----------|------------------------------------------------|----------------------------------------------------------|
| control  | DEALER, server connects; ROUTER, trainer binds | anything: state and offers are said again every second   |
| passing  | DEALER, server connects; ROUTER, server binds  | anything: a chunk is asked for again, then elsewhere     |
| features | PUSH, server connects; PULL, trainer binds     | anything: a server drops and counts what cannot be sent  |

Sending never blocks.
"""

import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
import zmq.asyncio
import zmq.auth
from msgspec.msgpack import Decoder
from zmq.auth.thread import ThreadAuthenticator

from tlt_server.errors import ConfigError, WireError
from tlt_server.keys import require_private
from tlt_server.preflight import is_loopback
from tlt_server.wire.connections import Bounds, Doorkeeper
from tlt_server.wire.messages import MAX_CHUNK_BYTES, MAX_CHUNKS_WANTED, Buffer, Message, Rejected, decode, encode

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 4 * MAX_CHUNKS_WANTED
"""Messages. libzmq learns that a queue was read half a queue at a time: half must hold the chunks that are wanted at
once, and as many that are asked for again."""
FEATURES_WAITING, FEATURES_UNSENT = 64, 4
"""Messages of a few MiB, at the trainer and at a server."""
MAX_FEATURES_BYTES = 32 << 20
MAX_WORD_BYTES = 64 << 10
"""Of a frame of features, and of one on the control link beside a chunk."""
CONTROL = Bounds(connections=128, waiting=16 << 20, in_all=256 << 20, prove_within=10.0)
FEATURES = Bounds(connections=128, waiting=512 << 20, in_all=2 << 30, prove_within=math.inf)
MAX_PEERS_COUNTED = 1024
OTHERS = b"others"
"""Whom messages that cannot be read are counted for, once so many peers have sent some."""
TRAINER = b"the trainer"
"""The one peer of a side that connects."""

OPTIONS = {"handshake_ivl": 5000, "immediate": True, "reconnect_ivl_max": 1000, "linger": 0}
"""Milliseconds. immediate: while nobody listens sending fails, rather than queue what is stale by then."""
KEEPALIVE = {"tcp_keepalive": 1, "tcp_keepalive_idle": 5, "tcp_keepalive_intvl": 1, "tcp_keepalive_cnt": 5}
KEEPALIVE |= {"tcp_maxrt": 5000}
"""The kernel gives up a TCP connection that is silent for 10 s. Not ZMTP's heartbeats: where one is due on a connection
whose end libzmq 4.3.5 has seen, but not read to, it aborts the process (zeromq/libzmq issues 3937 and 4364, open)."""


class Allowed:
    """Public keys that may connect; others from one moment to the next."""

    def __init__(self) -> None:
        self.keys: frozenset[bytes] = frozenset()

    def callback(self, _: str, key: bytes) -> bool:
        """Of pyzmq's authenticator, in its thread."""
        return key in self.keys


class CurveKeys(NamedTuple):
    """CURVE certificates, as `zmq.auth.create_certificates` writes them.

    own: this side's, with its secret key. peers: where we bind, a folder of the public ones that may connect, or these
    themselves; where we connect, the public one of the side that binds, or its key.
    """

    own: Path
    peers: Path | Allowed | bytes


class _End:
    """A socket for one thread, which must be the one that closes it.

    address: `ipc://PATH` or `tcp://HOST:PORT`; of a host other than loopback only with `curve`.
    bounds: of those who connect, where it binds; None: it connects.
    options: of the socket.

    address: with the port, where the system chose one.
    read: messages until now, of any kind.

    Raises ConfigError: the address or a key cannot be used.
    """

    def __init__(self, address: str, kind: int, curve: CurveKeys | None, bounds: Bounds | None, **options: Any) -> None:
        _check_address(address, curve)
        self.read, self.curve = 0, curve
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._door: Doorkeeper | None = None
        try:
            for name, value in (OPTIONS | KEEPALIVE | options).items():
                setattr(self._socket, name, value)
            if curve is not None:
                self._secure(curve, binds=bounds is not None)
            if bounds is None:
                self._socket.connect(address)
            else:
                self._bind(address, bounds)
        except (zmq.ZMQError, OSError, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(f"link {address}: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def cut(self) -> int:
        """Connections until now, for they asked too much."""
        return self._door.cut if self._door is not None else 0

    def wait(self, seconds: float) -> None:
        """Returns when there may be something to read, or after so many seconds."""
        self._socket.poll(int(seconds * 1000))

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _bind(self, address: str, bounds: Bounds) -> None:
        self._door = Doorkeeper(self._socket, bounds, address)
        before = os.umask(0o077)  # to what is bound in the file system, its owner alone may connect
        try:
            self._socket.bind(address)
        finally:
            os.umask(before)

    def _secure(self, curve: CurveKeys, *, binds: bool) -> None:
        socket = self._socket
        public, secret = zmq.auth.load_certificate(curve.own)
        if secret is None:
            raise ConfigError(f"{curve.own} holds no secret key: name this side's own certificate, *.key_secret")
        require_private(curve.own)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        if isinstance(curve.peers, bytes):
            socket.curve_serverkey = curve.peers
        elif isinstance(curve.peers, Path) and not binds:
            socket.curve_serverkey = zmq.auth.load_certificate(curve.peers)[0]
        else:
            self._let_in(curve.peers)

    def _let_in(self, peers: Path | Allowed) -> None:
        if isinstance(peers, Path) and not zmq.auth.load_certificates(peers):
            raise ConfigError(f"no certificate (*.key) in {peers}: put the public ones of the peers there")
        self._socket.curve_server = True
        self._authenticator.start()
        if isinstance(peers, Path):
            self._authenticator.configure_curve(location=peers)
        else:
            self._authenticator.configure_curve_callback("*", peers)

    def _send(self, frames: Sequence[Any]) -> bool:
        """Without blocking and without a copy; False if the peer is away, or does not read."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                raise
            return False
        return True

    def _receive(self) -> "list[zmq.Frame] | None":
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.read += 1
        return frames

    def _took(self, frames: "list[zmq.Frame]", *, proves: bool) -> None:
        if self._door is not None and frames:  # a ROUTER is given none where a peer sends none but its name
            self._door.took(frames, proves=proves)


class Link(_End):
    """An end of the control link.

    reads: the messages that arrive here.
    name: connects, and is known to the peer as `NAME/TOKEN`; None: binds.

    rejected: messages dropped because they could not be read or used, by peer, as far as there are not too many.
    key: of who sent what was received last, where it binds; empty where nothing is encrypted.
    """

    def __init__(
        self,
        address: str,
        reads: Decoder[Message],
        name: str | None = None,
        curve: CurveKeys | None = None,
        bounds: Bounds = CONTROL,
    ) -> None:
        self.rejected: Counter[bytes] = Counter()
        self.key = b""
        self._rejected_us: set[bytes] = set()
        self._reads, self._binds = reads, name is None
        options: dict[str, Any] = {"sndhwm": HIGH_WATER_MARK, "rcvhwm": HIGH_WATER_MARK}
        options |= {"maxmsgsize": MAX_CHUNK_BYTES + MAX_WORD_BYTES}
        if name is None:  # mandatory: what cannot be sent is not dropped silently; handover: to a peer that is back
            options |= {"router_mandatory": True, "router_handover": True}
            super().__init__(address, zmq.ROUTER, curve, bounds, **options)
        else:
            options |= {"routing_id": f"{name}/{secrets.token_hex(4)}".encode()}
            super().__init__(address, zmq.DEALER, curve, None, **options)

    async def arrival(self, seconds: float, *others: "Link") -> None:
        """As `wait`, for any of these, in an event loop; what arrives while this side sends may be noticed only after
        `seconds`."""
        poller = zmq.asyncio.Poller()
        for each in (self, *others):
            poller.register(each._socket, zmq.POLLIN)
        await poller.poll(int(seconds * 1000))

    def send(self, message: Message, payload: Buffer | None = None, to: bytes = TRAINER) -> bool:
        """False if the peer is away, or does not read."""
        frames = [to, encode(message)] if self._binds else [encode(message)]
        return self._send(frames if payload is None else [*frames, payload])

    def receive(self) -> tuple[bytes, Message, Buffer] | None:
        """Who sent, what, and its payload; None if there is nothing, or nothing that can be read."""
        if (frames := self._receive()) is None:
            return None
        peer = frames.pop(0).bytes if self._binds else TRAINER
        try:
            message, payload = decode([frame.buffer for frame in frames], self._reads)
        except WireError as error:
            self._took(frames, proves=False)
            self.reject(peer, str(error))
            return None
        self._took(frames, proves=True)
        if self._binds and self.curve is not None:
            self.key = str(frames[-1].get("User-Id")).encode()
        if not isinstance(message, Rejected):
            return peer, message, payload
        if peer not in self._rejected_us and len(self._rejected_us) < MAX_PEERS_COUNTED:
            self._rejected_us.add(peer)
            log.warning("%r rejects what we send: %r", peer, message.reason)
        return None

    def reject(self, peer: bytes, reason: str) -> None:
        """Counts a message that could not be read or used, logs a peer's first, and tells the peer."""
        known = peer if peer in self.rejected or len(self.rejected) < MAX_PEERS_COUNTED else OTHERS
        self.rejected[known] += 1
        if self.rejected[known] == 1:
            log.warning("dropped a message of %r: %s; further ones are only counted", peer, reason)
        self.send(Rejected(reason=reason), to=peer)


class Inlet(_End):
    """The trainer's end of the features link."""

    def __init__(self, address: str, curve: CurveKeys | None = None) -> None:
        super().__init__(address, zmq.PULL, curve, FEATURES, rcvhwm=FEATURES_WAITING, maxmsgsize=MAX_FEATURES_BYTES)

    def receive(self) -> list[Buffer] | None:
        """The frames of the next message; None if there is none."""
        if (frames := self._receive()) is None:
            return None
        self._took(frames, proves=True)
        return [frame.buffer for frame in frames]


class Outlet(_End):
    """A server's end of the features link."""

    def __init__(self, address: str, curve: CurveKeys | None = None) -> None:
        super().__init__(address, zmq.PUSH, curve, None, sndhwm=FEATURES_UNSENT)

    @property
    def ready(self) -> bool:
        """Whether a trainer is there that reads."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    send = _End._send


def _check_address(address: str, curve: CurveKeys | None) -> None:
    """ipc and loopback stay on the machine; all else crosses a network, where anybody could speak and listen."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    is_port = port == "*" or (port.isdecimal() and int(port) < 1 << 16)  # libzmq would connect to any
    if not place or not (scheme == "ipc" or (scheme == "tcp" and host and is_port)):
        raise ConfigError(f"link {address}: write ipc://PATH or tcp://HOST:PORT")
    if scheme == "tcp" and curve is None and not is_loopback(host):
        raise ConfigError(f"link {address} leaves this machine: give CURVE keys, or use 127.0.0.1")
