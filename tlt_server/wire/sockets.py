"""The sockets, and the only file that touches zmq.

| link     | sockets                                        | what may be lost                                   |
|----------|------------------------------------------------|----------------------------------------------------|
| control  | DEALER, server connects; ROUTER, trainer binds | nothing that matters: it is said again (see wire/) |
| features | PUSH, server connects; PULL, trainer binds     | everything: a server drops what cannot be sent     |

Sending never blocks. A server that is slow asks for fewer chunks; the high-water mark only bounds what a peer that does
not read can make us hold.
"""

import ipaddress
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
import zmq.auth
from msgspec.msgpack import Decoder
from zmq.auth.thread import ThreadAuthenticator

from tlt_server.errors import ConfigError, WireError
from tlt_server.keys import require_private
from tlt_server.wire.messages import MAX_CHUNK_BYTES, MAX_CHUNKS_WANTED, Buffer, Message, Rejected, decode, encode

log = logging.getLogger(__name__)

# libzmq learns that a queue was read only half a queue at a time, so half of it must hold the chunks that are wanted at
# once, and as many that are asked for again. Beyond the mark a message is dropped; what was wanted is asked for again.
HIGH_WATER_MARK = 4 * MAX_CHUNKS_WANTED

FEATURES_WAITING = 64
"""Messages of features that wait for a trainer that is in the middle of a step, a few MiB each."""

FEATURES_UNSENT = 4
"""Of those, on the server's side."""

MAX_FEATURES_BYTES = 64 << 20
"""Of a message's largest frame."""

TRAINER = b"the trainer"
"""The one peer of a side that connects."""


class CurveKeys(NamedTuple):
    """CURVE certificates, as `zmq.auth.create_certificates` writes them.

    own: this side's, with its secret key. peers: where we bind, a folder of the public ones that may connect; where we
    connect, the public one of the side that binds.
    """

    own: Path
    peers: Path


class Link:
    """One end of a link, for one thread.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`; of a host other than loopback only with `curve`.
        reads: the messages that arrive here.
        name: connects, and is known to the peer as `NAME/TOKEN`; None: binds.

    Attributes:
        rejected: messages dropped because they could not be read or used, by peer.

    Raises:
        ConfigError: the address or a key cannot be used.
    """

    def __init__(
        self, address: str, reads: Decoder[Message], name: str | None = None, curve: CurveKeys | None = None
    ) -> None:
        _check_address(address, curve)
        self.rejected: Counter[bytes] = Counter()
        self._rejected_us: set[bytes] = set()
        self._reads = reads
        self._binds = name is None
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER if self._binds else zmq.DEALER)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        try:
            self._configure(name)
            if curve is not None:
                _secure(self._socket, curve, self._authenticator if self._binds else None)
            (self._socket.bind if self._binds else self._socket.connect)(address)
        except (zmq.ZMQError, OSError, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(f"link {address}: {error}") from error

    @property
    def address(self) -> str:
        """Where this end is bound or connected; a port that the system chose is in it."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

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
        peer = frames.pop(0).bytes if self._binds else TRAINER
        try:
            message, payload = decode([frame.buffer for frame in frames], self._reads)
        except WireError as error:
            self.reject(peer, str(error))
            return None
        if not isinstance(message, Rejected):
            return peer, message, payload
        if peer not in self._rejected_us:
            self._rejected_us.add(peer)
            log.warning("%r rejects what we send: %r", peer, message.reason)
        return None

    def reject(self, peer: bytes, reason: str) -> None:
        """Counts a message that could not be read or used, logs a peer's first, and tells the peer."""
        self.rejected[peer] += 1
        if self.rejected[peer] == 1:
            log.warning("dropped a message of %r: %s; further ones are only counted", peer, reason)
        self.send(Rejected(reason=reason), to=peer)

    def close(self) -> None:
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _configure(self, name: str | None) -> None:
        socket = self._socket
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
        socket.maxmsgsize = 2 * MAX_CHUNK_BYTES
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

    Raises:
        ConfigError: the address or a key cannot be used.
    """

    def __init__(self, address: str, curve: CurveKeys | None = None) -> None:
        _check_address(address, curve)
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.rcvhwm, self._socket.maxmsgsize = FEATURES_WAITING, MAX_FEATURES_BYTES
        try:
            if curve is not None:
                _secure(self._socket, curve, self._authenticator)
            self._socket.bind(address)
        except (zmq.ZMQError, OSError, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(f"link {address}: {error}") from error

    @property
    def address(self) -> str:
        """Where it is bound; a port that the system chose is in it."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait(self, seconds: float) -> None:
        """Returns when there is something to read, or after so many seconds."""
        self._socket.poll(int(seconds * 1000))

    def receive(self) -> list[Buffer] | None:
        """The frames of the next message; None if there is none."""
        try:
            return [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def close(self) -> None:
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
        _check_address(address, curve)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._socket.sndhwm, self._socket.linger = FEATURES_UNSENT, 0
        self._socket.immediate = True  # while nobody listens, sending fails; else it would queue what is stale by then
        self._socket.reconnect_ivl_max = 1000
        _notice_a_cut(self._socket)
        try:
            if curve is not None:
                _secure(self._socket, curve)
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


def _notice_a_cut(socket: "zmq.Socket[bytes]") -> None:
    """Has the kernel give up a TCP connection that is silent for ten seconds, or answers nothing for five.

    Not ZMTP's heartbeats: where one is due on a connection whose end libzmq has seen, but not read to, because a queue
    was full, libzmq 4.3.5 aborts the process (zeromq/libzmq issues 3937 and 4364, both open).
    """
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, 5, 1  # seconds
    socket.tcp_keepalive_cnt = 5
    socket.tcp_maxrt = 5000  # ms


def _secure(socket: "zmq.Socket[bytes]", curve: CurveKeys, authenticator: ThreadAuthenticator | None = None) -> None:
    """authenticator: of a side that binds."""
    socket.curve_publickey, secret = zmq.auth.load_certificate(curve.own)
    if secret is None:
        raise ConfigError(f"{curve.own} holds no secret key: name this side's own certificate, *.key_secret")
    require_private(curve.own)
    socket.curve_secretkey = secret
    if authenticator is None:
        socket.curve_serverkey = zmq.auth.load_certificate(curve.peers)[0]
        return
    if not zmq.auth.load_certificates(curve.peers):
        raise ConfigError(f"no certificate (*.key) in {curve.peers}: put the public ones of the peers there")
    socket.curve_server = True
    authenticator.start()
    authenticator.configure_curve(location=curve.peers)


def _check_address(address: str, curve: CurveKeys | None) -> None:
    """ipc and loopback stay on the machine; all else crosses a network, where anybody could speak and listen."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if not place or not (scheme == "ipc" or (scheme == "tcp" and host and _is_port(port))):
        raise ConfigError(f"link {address}: write ipc://PATH or tcp://HOST:PORT")
    if scheme == "tcp" and curve is None and not _is_loopback(host.strip("[]")):
        raise ConfigError(f"link {address} leaves this machine: give CURVE keys, or use 127.0.0.1")


def _is_port(text: str) -> bool:
    """libzmq connects to what is none without a word. `*`: where we bind, the system chooses one."""
    return text == "*" or (text.isdecimal() and int(text) < 1 << 16)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
