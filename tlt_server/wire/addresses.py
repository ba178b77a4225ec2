"""Where a link may be, and the keys that it takes where that is beyond this machine."""

import ipaddress
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from tlt_server.errors import ConfigError
from tlt_server.keys import require_private


class CurveKeys(NamedTuple):
    """CURVE certificates, as `zmq.auth.create_certificates` writes them.

    own: this side's, with its secret key. peers: where we bind, a folder of the public ones that may connect; where we
    connect, the public one of the side that binds.
    """

    own: Path
    peers: Path


def secure(socket: "zmq.Socket[bytes]", curve: CurveKeys, authenticator: ThreadAuthenticator | None = None) -> None:
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


def check_address(address: str, curve: CurveKeys | None) -> None:
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
