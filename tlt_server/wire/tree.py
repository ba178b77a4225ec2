"""Who fetches a drafter from whom, by the trainer's plan: a few from the trainer, others from servers that get it, too.

What is planned badly costs time alone: a server that gets nothing from its source goes on with the trainer.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tlt_server.preflight import is_loopback
from tlt_server.wire.messages import MAX_TAKERS, Key, Source

log = logging.getLogger(__name__)

FAN_OUT = 2
"""Servers that fetch from one, and from the trainer: how often a link carries a drafter. With one, 64 servers would be
a line, which any of them could hold up; with two, the last is the sixth."""
PAYS = 1 << 30
"""Bytes that a trainer would send to all, a second's work: with fewer, a source that is gone costs more than is won."""
DOUBTED = 300.0
"""Seconds: a server from which another could not fetch is nobody's source, and that other has none."""


@dataclass
class Member:
    """A server: when it was last heard, where others fetch from it, its public key."""

    heard: float
    door: str
    key: bytes

    @property
    def is_local(self) -> bool:
        """Whether others than those of its machine cannot reach its door."""
        return self.door.startswith("ipc://") or is_loopback(self.door.removeprefix("tcp://").rpartition(":")[0])


class _Place(NamedTuple):
    """above: the source; None: the trainer. level: servers between it and the trainer."""

    above: bytes | None
    level: int


class Tree:
    """Of one drafter after another, over the servers that are here.

    fan_out: 0: all fetch from the trainer. pays: see PAYS.
    members: all servers, by identity; to be kept up to date, but with `leave`.
    """

    def __init__(self, fan_out: int, pays: int = PAYS, clock: Callable[[], float] = time.monotonic) -> None:
        self.members: dict[bytes, Member] = {}
        self._fan_out, self._pays, self._clock = fan_out, pays, clock
        self._size = 0
        self._places: dict[bytes, _Place] = {}
        self._below: Counter[bytes | None] = Counter()
        self._doubted: dict[bytes, float] = {}

    @property
    def takers(self) -> tuple[Key, ...]:
        """Who may fetch from servers; nobody while there are so few that all fetch from the trainer."""
        if not 0 < self._fan_out < len(self.members):
            return ()
        return tuple(sorted({member.key for member in self.members.values()}))[:MAX_TAKERS]

    def begin(self, size: int) -> list[bytes]:
        """Another drafter, of so many bytes. Returns the servers, the sources before those that can be none."""
        now = self._clock()
        self._size = size
        self._doubted = {peer: until for peer, until in self._doubted.items() if until > now}
        self._places, self._below = {}, Counter()
        return sorted(self.members, key=lambda peer: not self._can_give(peer))

    def source(self, peer: bytes) -> Source | None:
        """Of a member, the same each time while that is here; None: the trainer."""
        if peer not in self._places:
            above = self._above(peer)
            self._places[peer] = _Place(above, 0 if above is None else self._places[above].level + 1)
            self._below[above] += 1
        above, level = self._places[peer]
        if above is None or (giver := self.members.get(above)) is None:
            return None
        return Source(giver.door, giver.key, level)

    def failed(self, peer: bytes) -> None:
        """A member came to the trainer: its source, if it had one, was not good, or it cannot fetch from any."""
        if (above := self._places.get(peer, _Place(None, 0)).above) is not None:
            if not self._is_doubted(peer):
                log.warning(
                    "%r gets no drafter from %r: for %g s they are not among who pass it on", peer, above, DOUBTED
                )
            self._doubted |= dict.fromkeys((peer, above), self._clock() + DOUBTED)

    def leave(self, peer: bytes) -> None:
        del self.members[peer]
        if (place := self._places.pop(peer, None)) is not None:
            self._below[place.above] -= 1

    def _above(self, peer: bytes) -> bytes | None:
        """The first with room; they were placed level by level."""
        pays = len(self.members) * self._size >= self._pays
        if not pays or self._below[None] < self._fan_out or self._is_doubted(peer):
            return None
        local = self.members[peer].is_local
        rooms = (each for each in self._places if self._below[each] < self._fan_out and self._can_give(each))
        return next((each for each in rooms if local or not self.members[each].is_local), None)

    def _can_give(self, peer: bytes) -> bool:
        return bool(self.members[peer].door) and not self._is_doubted(peer)

    def _is_doubted(self, peer: bytes) -> bool:
        return self._doubted.get(peer, 0.0) > self._clock()
