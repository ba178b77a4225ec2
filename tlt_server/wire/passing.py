"""A drafter from server to server, chunk by chunk as it comes: the door of one that has it, the source of one that has not.

The trainer says who fetches from whom (tree.py) and what the sha256 of each chunk is. A source that lies, stalls or is gone
costs time alone: who fetched from it goes on with the trainer."""

import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tlt_server.wire.connections import Bounds
from tlt_server.wire.files import Incoming
from tlt_server.wire.messages import READS_TO_DOOR, READS_TO_TAKER, Chunk, ChunksWanted, Source
from tlt_server.wire.sockets import Allowed, CurveKeys, Link

log = logging.getLogger(__name__)

TAKERS = Bounds(connections=32, waiting=1 << 20, in_all=16 << 20, prove_within=10.0)
"""Who say only which chunks they want."""
PATIENCE = 2.0
"""Seconds without a chunk for each server that it passes: who is next to one that stalls gives it up, and has chunks from
the trainer, before those below despair of it."""
SLOWEST = 4 << 20
"""Bytes a second of a source, in the long run."""


class _Asked(NamedTuple):
    digest: bytes
    start: int
    stop: int


class Door:
    """What a server gives to others. address: where."""

    def __init__(self, trainer: Link, folder: Path) -> None:
        """Beside the link to the trainer. Raises ConfigError, OSError: no address of this machine can be bound."""
        self._allowed = Allowed()
        curve = None if trainer.curve is None else CurveKeys(trainer.curve.own, self._allowed)
        self.link = Link(_beside(trainer.address, folder), READS_TO_DOOR, None, curve, TAKERS)
        self.address = self.link.address
        self._asked: dict[bytes, _Asked] = {}

    def allow(self, keys: Iterable[bytes]) -> None:
        self._allowed.keys = frozenset(keys)

    def step(self, held: Incoming | None) -> None:
        """Hears what is wanted, once, and sends what is here of it; the rest as soon as it is. OSError: the disk's."""
        if (arrived := self.link.receive()) is not None and isinstance(wanted := arrived[1], ChunksWanted):
            start, before = wanted.start, self._asked.pop(arrived[0], None)
            if before is not None and (before.digest, before.stop) == (wanted.digest, start):
                start = before.start
            self._asked[arrived[0]] = _Asked(wanted.digest, start, wanted.stop)
            if len(self._asked) > TAKERS.connections:
                del self._asked[next(iter(self._asked))]
        for peer, (digest, start, stop) in list(self._asked.items()):
            if held is not None and digest == held.digest:  # it may be told of here later than there
                sent = all(self._send(held, index, peer) for index in range(start, min(stop, held.next)))
                if not sent or stop <= held.next:
                    del self._asked[peer]
                else:
                    self._asked[peer] = _Asked(digest, max(start, held.next), stop)

    def _send(self, held: Incoming, index: int, peer: bytes) -> bool:
        return self.link.send(Chunk(digest=held.digest, index=index), held.chunk(index), to=peer)


class Upstream:
    """The server that another fetches from, with the patience that it has. ConfigError: it cannot be, at this address."""

    def __init__(self, source: Source, trainer: Link, name: str, now: float) -> None:
        curve = None if trainer.curve is None else CurveKeys(trainer.curve.own, source.key)
        self.link = Link(source.door, READS_TO_TAKER, name, curve)
        self._patience, self._until, self._is_connected = PATIENCE * source.level, now + PATIENCE, False

    def ask(self, wanted: ChunksWanted, now: float) -> bool:
        """False: not connected, yet or any more."""
        if self.link.send(wanted):
            if not self._is_connected:
                self._is_connected, self._until = True, now + self._patience
            return True
        if self._is_connected:
            self._until = now
        return False

    def gave(self, size: int, now: float) -> None:
        """A good chunk."""
        self._until = min(self._until + size / SLOWEST, now + self._patience)

    def is_spent(self, now: float) -> bool:
        """Whether it is worse than the trainer would be."""
        return now >= self._until


def _beside(trainer: str, folder: Path) -> str:
    """In reach of whoever reaches what leads to the trainer from here."""
    if trainer.startswith("ipc://"):
        return f"ipc://{folder}/door"
    host, _, port = trainer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect((host, int(port)))
        return f"tcp://{probe.getsockname()[0]}:*"
