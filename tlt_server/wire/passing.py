"""A drafter from server to server, each chunk as soon as it is here.

The trainer says who fetches from whom (tree.py), and what the sha256 of each chunk is. A source that lies, stalls or
is gone costs time alone: who fetched from it goes on with the trainer.
"""

import logging
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from tlt_server.errors import ConfigError
from tlt_server.wire.connections import Bounds
from tlt_server.wire.files import Incoming
from tlt_server.wire.messages import (
    MAX_CHUNKS_WANTED,
    READS_TO_DOOR,
    READS_TO_TAKER,
    Buffer,
    Chunk,
    ChunksWanted,
    Message,
    Source,
)
from tlt_server.wire.sockets import Allowed, CurveKeys, Link

log = logging.getLogger(__name__)

TAKERS = Bounds(connections=32, waiting=1 << 20, in_all=16 << 20, prove_within=10.0)
"""They say only which chunks they want."""
DOOR = "door"
"""A socket among the drafters, where the trainer is of this machine."""
PATIENCE = 2.0
"""Seconds to connect, and, times its level, to wait for a chunk: below a server that stalls, the first gives it up and
goes on with the trainer before those below that one despair of it."""
SLOWEST = 4 << 20
"""Bytes a second that a source must give in the long run."""


class _Door:
    """Where others fetch what is held here."""

    def __init__(self, trainer: Link, folder: Path) -> None:
        """ConfigError, OSError: it cannot be."""
        self.allowed = Allowed()
        curve = None if trainer.curve is None else CurveKeys(trainer.curve.own, self.allowed)
        self.link = Link(_beside(trainer.address, folder), READS_TO_DOOR, None, curve, TAKERS)
        self._asked: dict[bytes, tuple[bytes, int, int]] = {}  # by peer: digest, start, stop

    def step(self, held: Incoming | None) -> None:
        """Hears once what is wanted, and sends what of it is here. OSError: the disk's."""
        if (arrived := self.link.receive()) is not None and isinstance(wanted := arrived[1], ChunksWanted):
            digest, start, stop = self._asked.pop(arrived[0], (b"", 0, 0))
            goes_on = (digest, stop) == (wanted.digest, wanted.start)  # it has half of what it asked for before
            start = max(start, wanted.stop - MAX_CHUNKS_WANTED) if goes_on else wanted.start
            self._asked[arrived[0]] = wanted.digest, start, wanted.stop
            if len(self._asked) > TAKERS.connections:
                del self._asked[next(iter(self._asked))]
        for peer, (digest, start, stop) in list(self._asked.items()):
            if held is not None and digest == held.digest:  # else this side may be told of it later than they
                here = min(stop, held.next)
                if all(self._send(peer, index, held) for index in range(start, here)) and here < stop:
                    self._asked[peer] = digest, max(start, here), stop
                else:
                    del self._asked[peer]  # it has all of it, or is gone, or does not read: then it will ask again

    def _send(self, peer: bytes, index: int, held: Incoming) -> bool:
        return self.link.send(Chunk(digest=held.digest, index=index), held.chunk(index), to=peer)


class _Upstream:
    """The server that a drafter is fetched from."""

    def __init__(self, source: Source, trainer: Link, name: str, now: float) -> None:
        """ConfigError: it cannot be."""
        curve = None if trainer.curve is None else CurveKeys(trainer.curve.own, source.key)
        self.link = Link(source.door, READS_TO_TAKER, name, curve)
        self._patience, self.until, self._is_connected = PATIENCE * source.level, now + PATIENCE, False

    def ask(self, wanted: ChunksWanted, now: float) -> bool:
        """False: it is not connected, yet or any more."""
        if not self.link.send(wanted):
            self.until = now if self._is_connected else self.until
            return False
        if not self._is_connected:
            self._is_connected, self.until = True, now + self._patience
        return True

    def gave(self, size: int, now: float) -> None:
        self.until = min(self.until + size / SLOWEST, now + self._patience)


class Peers:
    """The servers that one fetches from, and that fetch from it. trainer: the link to it. name: of this server. folder:
    of drafters."""

    def __init__(self, trainer: Link, name: str, folder: Path, clock: Callable[[], float]) -> None:
        self._trainer, self._name, self._folder, self._clock = trainer, name, folder, clock
        self._upstream: _Upstream | None = None
        self._door: _Door | None = None
        self._is_shut = False
        self._held: Incoming | None = None

    @property
    def links(self) -> list[Link]:
        return [each.link for each in (self._upstream, self._door) if each is not None]

    @property
    def has_source(self) -> bool:
        """Beside the trainer."""
        return self._upstream is not None

    def begin(self, incoming: Incoming, source: Source | None) -> None:
        """What comes is passed on from now on; None: it comes from the trainer."""
        self.end()
        self._held = incoming
        if source is not None and incoming.missing:
            try:
                self._upstream = _Upstream(source, self._trainer, self._name, self._clock())
            except ConfigError as error:
                log.warning("fetched from the trainer: %s", error)

    def end(self) -> None:
        """Nothing is passed on any more."""
        self.leave_source()
        self._held = None

    def leave_source(self, why: str = "") -> None:
        """What is missing comes from the trainer. why: told."""
        if self._upstream is not None:
            if why:
                log.warning("fetched from the trainer, no longer from %s: %s", self._upstream.link.address, why)
            self._upstream.link.close()
            self._upstream = None

    def ask(self, wanted: ChunksWanted) -> bool:
        """The source, or the trainer. False: it was not heard."""
        if self._upstream is None:
            return self._trainer.send(wanted)
        asked, now = self._upstream.ask(wanted, self._clock()), self._clock()
        if now >= self._upstream.until:
            self.leave_source("it stalls or is gone")
            return False
        return asked

    def receive(self) -> tuple[Message, Buffer] | None:
        """From the source."""
        if self._upstream is None or (arrived := self._upstream.link.receive()) is None:
            return None
        return arrived[1:]

    def gave(self, size: int) -> None:
        """The source, a good chunk."""
        if self._upstream is not None:
            self._upstream.gave(size, self._clock())

    def let_in(self, keys: Collection[bytes]) -> str:
        """Who has one of these may fetch from here, and nobody else. Returns where; empty: nowhere, yet or at all."""
        if keys and self._door is None and not self._is_shut:
            try:
                self._door = _Door(self._trainer, self._folder)
            except (ConfigError, OSError) as error:
                self._is_shut = True
                log.warning("no drafter is passed on to other servers: %s", error)
        if self._door is None:
            return ""
        self._door.allowed.keys = frozenset(keys)
        return self._door.link.address

    def give(self) -> None:
        """What others want and is here."""
        try:
            if self._door is not None:
                self._door.step(self._held)
        except OSError as error:
            log.warning("the drafter is passed on no more: %s", error)
            self._held = None

    def close(self) -> None:
        self.end()
        if self._door is not None:
            self._door.link.close()
        (self._folder / DOOR).unlink(missing_ok=True)  # which libzmq leaves, in this life or an earlier one


def _beside(trainer: str, folder: Path) -> str:
    """An address for whoever reaches the trainer as this machine does."""
    if trainer.startswith("ipc://"):
        return f"ipc://{folder / DOOR}"
    host, _, port = trainer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect((host, int(port)))
        return f"tcp://{probe.getsockname()[0]}:*"
