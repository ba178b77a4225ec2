"""A control call over all members: prepare, apply, commit, or nothing. Plans only; `control.py` asks and is answered.

    PREPARE ── all answer ──▶ APPLY ── all answer ──▶ DONE
                                 └── one refused what has an undo ──▶ UNDO ──▶ DONE

A member that does not answer is quarantined; one that refuses what others did is, too. What all refuse changed nothing.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    PREPARE = "prepare"
    APPLY = "apply"
    UNDO = "undo"
    DONE = "done"


class Answer(StrEnum):
    """OK: done. REFUSED: it says no, and nothing changed there. FAILED: none came, or one that leaves it open."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


class Outcome(StrEnum):
    """COMMITTED: on enough members. SCARCE: on fewer. REFUSED: nothing has changed on those that remain."""

    COMMITTED = "committed"
    SCARCE = "scarce"
    REFUSED = "refused"


class Kind(StrEnum):
    """What a control call does to a fleet."""

    PAUSE = "pause"
    RESUME = "resume"
    OPEN = "open"
    WRITE = "write"
    CLOSE = "close"
    NAME = "name"
    GROUP = "group"
    LEAVE = "leave"
    PLAIN = "plain"


UNDONE = frozenset({Kind.PAUSE, Kind.OPEN, Kind.GROUP})
"""All members, or none."""
HOLDING = frozenset({Kind.PAUSE, Kind.RESUME, Kind.OPEN, Kind.WRITE, Kind.CLOSE, Kind.NAME})
"""While one is under way, no request goes out."""


class Publication(NamedTuple):
    """What of a publication is under way. named: what a call has named it. path: the folder that all of it came from,
    with its checksum; None: it came otherwise."""

    paused: bool = False
    opened: bool = False
    wrote: bool = False
    named: str | None = None
    path: str | None = None
    checksum: str | None = None

    @property
    def holds(self) -> bool:
        """Whether members may have other weights than the fleet's name says, or generate nothing."""
        return self.paused or self.opened or self.wrote

    def after(self, kind: Kind, named: str | None, source: tuple[str | None, str | None]) -> tuple["Publication", bool]:
        """What is under way after a call; whether it ends a publication, whose name and path are still in it."""
        new = self
        if kind is Kind.WRITE:
            path, checksum = source if not self.wrote else (None, None)  # of several writes none is the whole
            new = new._replace(wrote=True, named=named or new.named, path=path, checksum=checksum)
        elif kind is Kind.NAME:
            new = new._replace(named=named)
        elif kind is Kind.CLOSE:
            new = new._replace(opened=False, named=named or new.named)
        elif kind is Kind.RESUME:
            new = new._replace(paused=False)
        elif kind in (Kind.PAUSE, Kind.OPEN):
            new = new._replace(paused=new.paused or kind is Kind.PAUSE, opened=new.opened or kind is Kind.OPEN)
        if kind is Kind.NAME and not new.wrote:  # the same weights under another name, at once
            return new, not new.opened
        return new, new.wrote and not new.paused and not new.opened

    def over(self) -> "Publication":
        return Publication(self.paused, self.opened)


NOTHING = Publication()


class Transaction:
    """One call. members: in service; passengers: stale ones that it may bring up to date, on which nothing depends."""

    def __init__(self, kind: Kind, members: Iterable[str], passengers: Iterable[str] = (), min_ready: int = 1) -> None:
        self.kind, self.min_ready = kind, min_ready
        self.members, self.passengers = frozenset(members), frozenset(passengers)
        self.phase = Phase.PREPARE
        self.outcome: Outcome | None = None
        self.done: frozenset[str] = frozenset()
        """The members that have done it, when the outcome is known."""
        self.lost: dict[str, str] = {}
        """Those that are to be quarantined, and why."""
        self._answers: dict[str, Answer] = {}
        self._out: set[str] = set()
        """Passengers that refused to come along; they stay stale."""

    def to_ask(self) -> frozenset[str]:
        """Who is to be asked in this phase, and has not answered."""
        if self.phase is Phase.DONE:
            return frozenset()
        asked = self.done if self.phase is Phase.UNDO else self._remaining()
        return asked - self._answers.keys()

    def answer(self, name: str, answer: Answer, why: str = "") -> None:
        """What a member answered; the last one of a phase begins the next."""
        assert name in self.to_ask(), f"{name} was not asked in {self.phase}"
        self._answers[name] = answer
        if answer is Answer.FAILED:
            self.lost[name] = why or f"did not answer in {self.phase}"
        if not self.to_ask():
            self._next()

    @property
    def applies(self) -> bool:
        return self.phase is Phase.APPLY

    @property
    def undoes(self) -> bool:
        return self.phase is Phase.UNDO

    def _remaining(self) -> frozenset[str]:
        return (self.members | self.passengers) - self.lost.keys() - self._out

    def _that(self, answer: Answer) -> frozenset[str]:
        return frozenset(name for name, given in self._answers.items() if given is answer)

    def _next(self) -> None:
        refused = self._that(Answer.REFUSED)
        if self.phase is Phase.PREPARE:
            self._out |= refused & self.passengers
            remaining = self._remaining()
            if refused & self.members or not remaining:
                self._end(Outcome.REFUSED)
            else:
                self.phase, self._answers = Phase.APPLY, {}
        elif self.phase is Phase.APPLY:
            self._applied(self._that(Answer.OK), refused)
        else:
            self.lost |= dict.fromkeys(refused, "what it had begun could not be undone")
            self.done = frozenset()
            self._end(Outcome.REFUSED)

    def _applied(self, done: frozenset[str], refused: frozenset[str]) -> None:
        self._out |= refused & self.passengers
        if not done:
            self._end(Outcome.REFUSED)
        elif self.kind in UNDONE and refused & self.members:
            self.done, self.phase, self._answers = done, Phase.UNDO, {}
        else:
            self.done = done
            self.lost |= dict.fromkeys(refused, "refused what others did")
            self._end(Outcome.COMMITTED if len(done) >= self.min_ready else Outcome.SCARCE)

    def _end(self, outcome: Outcome) -> None:
        self.phase, self.outcome = Phase.DONE, outcome
