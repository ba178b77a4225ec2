"""Who is in the fleet, and who may be sent a request: by the version of the weights alone. No I/O; time is an argument.

    joining ─▶ stale ─▶ ready ⇄ suspect ─▶ quarantined ─▶ stale …        retired from any, and back by joining

Probes move ready ⇄ suspect ─▶ quarantined. Only weights that are the fleet's lead from stale to ready.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tlt_server.errors import ConfigError
from tlt_server.fleet.transaction import HOLDING, NOTHING, Outcome, Publication, Transaction


class State(StrEnum):
    """Of a member."""

    JOINING = "joining"
    """It has not answered yet."""
    STALE = "stale"
    """It answers; its weights are not known to be the fleet's."""
    READY = "ready"
    SUSPECT = "suspect"
    """Of late it did not answer a probe: it takes part in transactions, and gets no request."""
    QUARANTINED = "quarantined"
    RETIRED = "retired"


AFTER = {
    State.JOINING: {State.STALE, State.QUARANTINED, State.RETIRED, State.JOINING},
    State.STALE: {State.READY, State.QUARANTINED, State.RETIRED, State.JOINING},
    State.READY: {State.SUSPECT, State.STALE, State.QUARANTINED, State.RETIRED, State.JOINING},
    State.SUSPECT: {State.READY, State.STALE, State.QUARANTINED, State.RETIRED, State.JOINING},
    State.QUARANTINED: {State.STALE, State.RETIRED, State.JOINING},
    State.RETIRED: {State.JOINING},
}
IN_SERVICE = frozenset({State.READY, State.SUSPECT})
PROBES = 3
"""Probes without an answer, one after another, that put a member into quarantine."""
FAILURES = 3
"""Requests that failed, with none between that did not: a wedged engine answers probes."""
EVENTS = 1000


class Seen(NamedTuple):
    """What a member says of itself. publications: that its process has had; 0: its weights are those it started with.
    whole: nothing is under way, and nothing is missing. model: the last part of its name or folder."""

    weight_version: str
    publications: int = 0
    whole: bool = True
    model: str = ""

    @property
    def weights(self) -> str:
        """In words."""
        return f"weights {self.weight_version!r}" + ("" if self.whole else ", incomplete,")


class Ending(NamedTuple):
    """What a transaction is to bring: what is under way after it, whether that ends a publication, and the version of
    then. partly: it was done, and another is to follow that ends it."""

    after: Publication
    over: bool
    version: str | None
    partly: bool = False


class Event(NamedTuple):
    """number counts up from 1. time: seconds since 1970. replica: None: of the whole fleet."""

    number: int
    time: float
    kind: str
    replica: str | None
    detail: str


@dataclass
class Member:
    """A server. since: when its state began. silent: probes in a row without an answer; failed: requests."""

    name: str
    url: str
    since: float
    state: State = State.JOINING
    why: str = "has not answered yet"
    seen: Seen | None = None
    silent: int = 0
    failed: int = 0


@dataclass
class Fleet:
    """All members. version: the name of the weights that all in service have; None: nobody has joined yet.
    publications: how many went through this fleet; after the first one nobody's own checkpoint is good enough."""

    min_ready: int = 1
    version: str | None = None
    publications: int = 0
    model: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    under_way: Publication = NOTHING
    applied: Transaction | None = None
    """The transaction that is applied now."""
    taking_part: frozenset[str] = frozenset()
    """In it: what else is heard of these is older than its end."""
    events: list[Event] = field(default_factory=list)
    _told: int = 0

    def __post_init__(self) -> None:
        if self.min_ready < 1:
            raise ConfigError(f"--min-ready {self.min_ready}: must be 1 or more")

    # -- who --

    def ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.state is State.READY]

    def in_service(self) -> list[Member]:
        return [member for member in self.members.values() if member.state in IN_SERVICE]

    def waiting(self) -> list[Member]:
        """Those that a publication may bring up to date."""
        return [member for member in self.members.values() if member.state is State.STALE]

    @property
    def holds(self) -> bool:
        """Whether no request may go out, to anybody."""
        return self.under_way.holds or (self.applied is not None and self.applied.kind in HOLDING)

    def may_send(self, name: str) -> bool:
        """Whether this member may be sent a request: no other has other weights, and its own are the fleet's."""
        return not self.holds and self.enough and self.members[name].state is State.READY

    @property
    def enough(self) -> bool:
        return len(self.ready()) >= self.min_ready

    def fits(self, seen: Seen) -> bool:
        """Whether who says this has the fleet's weights. Before anything was published, they are those of the first."""
        published = self.publications == 0 or seen.publications > 0
        return seen.whole and published and seen.weight_version == self.version and seen.model == self.model

    # -- what happens --

    def join(self, name: str, url: str, now: float) -> None:
        """A member, or one that is another process now. One that is known is left as it is."""
        known = self.members.get(name)
        if known is not None and known.url == url and known.state is not State.RETIRED:
            return
        if known is None:
            self.members[name] = Member(name, url, now)
        else:
            known.url, known.seen, known.silent, known.failed = url, None, 0, 0
            self._move(known, State.JOINING, "another process of this name", now)
        self.tell("joined", name, url, now)

    def retire(self, name: str, why: str, now: float) -> None:
        if (member := self.members[name]).state is not State.RETIRED:
            self._move(member, State.RETIRED, why, now)

    def answered(self, name: str, seen: Seen, now: float) -> None:
        """A probe was answered. Nobody gets ready by that, but who was before and has the weights still; in the middle
        of a publication what it says of them means nothing."""
        member = self.members[name]
        if name in self.taking_part or member.state is State.RETIRED:
            return
        member.seen, member.silent = seen, 0
        if member.state in (State.JOINING, State.QUARANTINED):
            self._move(member, State.STALE, "is to be brought up to date", now)
        elif member.state in IN_SERVICE and not (self.under_way.wrote or self.under_way.opened or self.fits(seen)):
            self._move(member, State.STALE, self.lack(seen), now)
        elif member.state is State.SUSPECT:
            self._move(member, State.READY, "", now)

    def silent(self, name: str, why: str, now: float, *, dead: bool = False) -> None:
        """A probe was not answered. dead: nobody listens there any more."""
        member = self.members[name]
        if name in self.taking_part or member.state in (State.RETIRED, State.JOINING, State.QUARANTINED):
            return
        member.silent += 1
        if dead or member.silent >= PROBES:
            self._move(member, State.QUARANTINED, why, now)
        elif member.state is State.READY:
            self._move(member, State.SUSPECT, why, now)

    def request_ended(self, name: str, now: float, *, well: bool) -> None:
        """Only a request that ended well clears the streak of those that did not: not a probe, not a return."""
        member = self.members[name]
        member.failed = 0 if well else member.failed + 1
        if member.failed >= FAILURES and member.state in IN_SERVICE and name not in self.taking_part:
            self._move(member, State.QUARANTINED, f"{member.failed} requests in a row failed", now)

    def refused(self, name: str, wanted: str, now: float) -> None:
        """It answered 409 to a request that named these weights."""
        member = self.members[name]
        if wanted == self.version and member.state in IN_SERVICE and name not in self.taking_part:
            self._move(member, State.STALE, f"refused weight_version {wanted!r}", now)

    def quarantine(self, name: str, why: str, now: float) -> None:
        if (member := self.members[name]).state not in (State.QUARANTINED, State.RETIRED):
            self._move(member, State.QUARANTINED, why, now)

    def admit(self, name: str, seen: Seen, now: float) -> bool:
        """A stale member says what it has by now. Returns whether that made it ready."""
        member = self.members[name]
        if self.version is None:
            self.version, self.model = seen.weight_version, seen.model
        fits = member.state is State.STALE and self.fits(seen)
        if fits:
            member.seen = seen
            self._move(member, State.READY, "", now)
        elif member.state is State.STALE:
            member.seen, member.why = seen, self.lack(seen)
        return fits

    def published(self, version: str, members: Iterable[str], now: float, *, written: bool = True) -> None:
        """These have the weights of that name now, checked by what they say; the others in service are stale. Who was
        stale before is still to be admitted: it may be paused, or told less than the others. written: else only the
        name is new."""
        having = frozenset(members)
        self.version, self.publications = version, self.publications + written
        for member in self.members.values():
            if member.name not in having and member.state in IN_SERVICE:
                self._move(member, State.STALE, f"weight_version {version!r} has not reached it", now)
        self.tell("published" if written else "renamed", None, version, now)

    # -- transactions --

    def apply(self, plan: Transaction) -> None:
        """A transaction goes out to members; no request does, if it changes what they would answer."""
        self.applied, self.taking_part = plan, plan.to_ask()

    def conclude(self, plan: Transaction, end: Ending, now: float) -> bool:
        """What came of it holds from here on. end: what it was to bring. Returns whether it was done."""
        self.applied, self.taking_part = None, frozenset()
        done = plan.outcome in (Outcome.COMMITTED, Outcome.SCARCE) and not end.partly
        if done:
            self.under_way = end.after.over() if end.over else end.after
        if done and end.over:
            self.published(str(end.version), plan.done, now, written=end.after.wrote)
        for name, why in plan.lost.items():
            self.quarantine(name, why, now)
        return done

    def lack(self, seen: Seen) -> str:
        """Why who says this is not ready."""
        if seen.model != self.model:
            return f"serves {seen.model or 'no model'}, the fleet serves {self.model}"
        if not seen.whole:
            return f"its weights {seen.weight_version!r} are incomplete"
        if seen.weight_version != self.version:
            return f"has weight_version {seen.weight_version!r}, the fleet {self.version!r}"
        return "has the weights that it started with"

    # -- what is told --

    def _move(self, member: Member, state: State, why: str, now: float) -> None:
        assert state in AFTER[member.state], f"{member.name}: {member.state} -> {state}"
        member.state, member.why, member.since = state, why, now
        self.tell(state.value, member.name, why, now)

    def tell(self, kind: str, replica: str | None, detail: str, now: float) -> None:
        self._told += 1
        self.events.append(Event(self._told, now, kind, replica, detail))
        del self.events[:-EVENTS]
