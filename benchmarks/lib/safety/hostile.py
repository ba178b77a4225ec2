"""What a peer that means harm sends, drawn from a generator of random numbers: frames of ZMQ, and bytes of TCP."""

import contextlib
import random
import socket
from typing import Any

import msgspec

from tests.trainer.stand_in import MODEL
from tests.wire.ends import outgoing
from tlt_server.wire import messages
from tlt_server.wire.features import FeatureHeader, Rows
from tlt_server.wire.messages import Message, encode, sealed

ODD_NUMBERS = (-1, 0, 1, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
ODD_VALUES = (*ODD_NUMBERS, None, True, 0.5, float("nan"), float("inf"), "", "x" * 5000, "a\0b", b"\xff" * 40, [], {})
ODD_VALUES += ([[]] * 100, {"type": "Hello"}, "/dev/zero", "/proc/self/mem", "../..")
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
"""Of ZMTP 3.0, https://rfc.zeromq.org/spec/23."""
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + (6).to_bytes(4) + b"DEALER"
FRAME = b"\x03" + (60_000).to_bytes(8) + bytes(60_000)
"""One of a message of which more come."""
ENDLESS = 400

HELLO = messages.Hello(
    server="two:2", model=MODEL, target_version=0, weight_version="w", drafter_version=0, newest_drafter=0
)
UPDATE = msgspec.structs.replace(outgoing().header, model=MODEL)
SAID: tuple[Message, ...] = (
    HELLO,
    msgspec.structs.replace(HELLO, target_version=1, shared="/dev", drafter_version=1, settled_drafter=1, reason="no"),
    msgspec.structs.replace(HELLO, load=3, lent=True, offer=bytes(32), door="tcp://127.0.0.1:1"),
    messages.ChunksWanted(digest=bytes(32), start=0, stop=1),
    messages.Heartbeat(),
    messages.Heartbeat(takers=(b"", bytes(40))),
    UPDATE,
    msgspec.structs.replace(UPDATE, source=messages.Source("tcp://127.0.0.1:1", b"", 1)),
    messages.Chunk(digest=bytes(32), index=0),
)
ROWS = Rows("r", 2**64 - 1, 3, 0, 4, 0)
FEATURES = FeatureHeader(server="one:1", model=MODEL, kind="eagle", dtype="float32", width=256, rows=(ROWS,))


def _odd_field(said: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    inner = [key for key, value in said.items() if isinstance(value, dict)]
    if inner and draw.random() < 0.3:
        key = draw.choice(inner)
        return said | {key: _odd_field(said[key], draw)}
    names = [name for name in said if name != "type"] + ["unknown"]
    return said | {draw.choice(names): draw.choice(ODD_VALUES)}


def _spoilt(frame: bytes, draw: random.Random) -> bytes:
    spoilt = bytearray(frame)
    match draw.randrange(3):
        case 0:
            del spoilt[draw.randrange(len(spoilt)) :]
        case 1:
            spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        case 2:
            spoilt += draw.randbytes(draw.randrange(1, 400))
    return bytes(spoilt)


def control(draw: random.Random) -> list[bytes]:
    """Frames for either end of the control link."""
    message = draw.choice(SAID)
    payload = [draw.randbytes(draw.randrange(100))] if isinstance(message, messages.Chunk) else []
    match draw.randrange(5):
        case 0:
            return [draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(1, 6))]
        case 1:
            return [_spoilt(encode(message), draw), *payload]
        case 2:
            said = msgspec.msgpack.decode(encode(message)[5:])
            return [sealed(msgspec.msgpack.encode(_odd_field(said, draw))), *payload]
        case 3:
            return [sealed(draw.randbytes(draw.randrange(300))), *payload]
    return [encode(message), *payload]  # a good one, at a wrong time


def features(draw: random.Random) -> list[bytes]:
    """Frames for the trainer's end of the features link."""
    tokens = b"".join(draw.choice((-1, 0, 2**31 - 1)).to_bytes(4, "little", signed=True) for _ in range(4))
    states = draw.choice((b"\xff", b"\x7f", b"\x7e")) * (4 * 256 * 4)
    whole = [sealed(msgspec.msgpack.encode(FEATURES)), tokens, states, b""]
    said = msgspec.msgpack.decode(whole[0][5:])
    match draw.randrange(5):
        case 0:
            return [draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(1, 6))]
        case 1:
            return [_spoilt(whole[0], draw), *whole[1:]]
        case 2:
            return [sealed(msgspec.msgpack.encode(_odd_field(said, draw))), *whole[1:]]
        case 3:
            rows = [_odd_field(said["rows"][0], draw)] * draw.randrange(1, 4)
            return [sealed(msgspec.msgpack.encode(said | {"rows": rows})), *whole[1:]]
    return whole[: draw.randrange(1, 5)]


def greet(line: socket.socket) -> None:
    """As a peer would that is one."""
    line.sendall(GREETING)
    left = len(GREETING)  # of the answer: what is sent before it has come would be lost
    while left and (came := line.recv(left)):
        left -= len(came)
    line.sendall(READY)


def knock(port: int, draw: random.Random, *, endless: bool) -> socket.socket:
    """A connection that says a part of ZMTP's greeting, or all and then a message without end; to be closed."""
    line = socket.create_connection(("127.0.0.1", port), timeout=5)
    with contextlib.suppress(OSError):  # it is cut, as it should be
        if endless:
            greet(line)
            for _ in range(ENDLESS):
                line.sendall(FRAME)
        else:
            line.sendall(draw.choice((GREETING, draw.randbytes(64)))[: draw.randrange(65)])
    return line
