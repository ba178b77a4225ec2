"""Spot training: which GPUs train while their rollouts have drained, and give them back when they are needed; and how
fast (`Pace`) where they do not drain.

    state      means                                    leaves when
    BUSY       serves, or is not heard of               no load for `settle` seconds -> IDLE
    IDLE       has drained                              load, silence -> BUSY; enough are idle -> Start, TRAINING
    TRAINING   trains, or is about to stop              load or silence -> Yield; `yielded` -> BUSY

A worker that is told to yield stays TRAINING until it says that it has; past its deadline that is `Overdue`, once: who
runs it then ends it, and says `yielded` for it. Nothing here reads a clock or waits: every call is given the time, and
returns what is to be done. Times are seconds of any clock that does not go back.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias


class State(Enum):
    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"


class Start(NamedTuple):
    """Train on `workers` too, data parallel with those that train already."""

    workers: tuple[str, ...]


class Yield(NamedTuple):
    """Stop training on `worker` and free its memory, before `deadline`."""

    worker: str
    deadline: float


class Overdue(NamedTuple):
    """`worker` was to yield and has not: end what trains there."""

    worker: str


Action: TypeAlias = Start | Yield | Overdue


@dataclass
class _Worker:
    state: State = State.BUSY
    heard: float = -math.inf
    drained: float | None = None
    deadline: float | None = None
    is_overdue: bool = False


class Spot:
    """All workers' states, by name; each is BUSY until it is heard of.

    settle, silence, within: seconds, as in `SpotSettings`. at_least: workers that must be idle together for training to
    start; once it has, each that is idle joins.
    """

    def __init__(
        self, workers: tuple[str, ...], settle: float, silence: float, within: float, at_least: int = 1
    ) -> None:
        self._workers = {name: _Worker() for name in workers}
        self._settle, self._silence, self._within, self._at_least = settle, silence, within, at_least

    def state(self, worker: str) -> State:
        return self._workers[worker].state

    def report(self, worker: str, requests: int, now: float) -> list[Action]:
        """A load report: requests running and waiting."""
        reported = self._workers[worker]
        was_silent = now - reported.heard > self._silence
        reported.heard = now
        if requests:
            reported.drained = None
        elif reported.drained is None or was_silent:
            reported.drained = now
        return self.tick(now)

    def yielded(self, worker: str, now: float) -> list[Action]:
        """Nothing trains on the worker any more, asked or not."""
        freed = self._workers[worker]
        freed.state, freed.deadline, freed.is_overdue = State.BUSY, None, False
        freed.drained = None if freed.drained is None else now
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """What time alone brings about; call it a few times a second."""
        actions = [action for name, worker in self._workers.items() if (action := self._move(name, worker, now))]
        idle = tuple(name for name, worker in self._workers.items() if worker.state is State.IDLE)
        is_training = any(each.state is State.TRAINING and each.deadline is None for each in self._workers.values())
        if idle and (is_training or len(idle) >= self._at_least):
            for name in idle:
                self._workers[name].state = State.TRAINING
            actions.append(Start(idle))
        return actions

    def _move(self, name: str, worker: _Worker, now: float) -> Action | None:
        has_drained = worker.drained is not None and now - worker.heard <= self._silence
        if worker.state is not State.TRAINING:
            settled = has_drained and now - (worker.drained or 0.0) >= self._settle
            worker.state = State.IDLE if settled else State.BUSY
            return None
        if worker.deadline is None and not has_drained:
            worker.deadline = now + self._within
            return Yield(name, worker.deadline)
        if worker.deadline is not None and now >= worker.deadline and not worker.is_overdue:
            worker.is_overdue = True
            return Overdue(name)
        return None


LATE_S, LONG_S = 0.2, 2.0
"""From a server's decode steps until its report of them is heard, at most; between two reports of one that decodes."""
QUIET_EVERY_S = 10.0
"""Training rests until a report tells of steps without it, at least so often: others are held against those."""
STEPS_KEPT = 512
"""Of training, to be compared with reports: those of a few seconds, were they of some milliseconds each."""
FAR = 1e3
"""Times as long as expected, or less, that nobody's steps take: a report that says so teaches nothing."""
KEPT = 0.98
"""Of what is known, with each stretch of steps: that of the last fifty or so."""
LEAST_COST, COST_SPREAD = 0.05, 0.5
"""The least that is believed; and how far from 1, the most, a cost may well lie before anything was measured."""
LEAST_SCATTER = 0.03
"""Of what steps take over what they are expected to, from one stretch to the next, a standard deviation: steps are
counted a little before a report is heard."""


@dataclass
class _Decoding:
    """What is known of a server. decoded, expected: as it said at `at`. quiet: when it last told of steps without
    training.

    since: the same three of the report that a stretch of steps began with. Stretches meet where nothing was trained
    while the report was on its way: so what was trained in each is known. before: of the last one, seconds of
    its steps, and of training by itself beside them, over those expected; None: there is none to compare with. What
    else slows steps down changes little from one stretch to the next, so the cost is the slope of changes in the former
    by changes in the latter, by least squares. sums: of squares of the latter, of products, of squares of the former,
    and of ones. training: seconds, in `all`."""

    at: float
    decoded: float
    expected: float
    quiet: float = -math.inf
    since: tuple[float, float, float] | None = None
    before: tuple[float, float] | None = None
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    training: float = 0.0
    all: float = 0.0

    def learn(self, ratio: float, share: float) -> None:
        """Of a stretch."""
        if self.before is not None:
            by, more = ratio - self.before[0], share - self.before[1]
            new = more * more, by * more, by * by, 1.0
            self.sums = tuple(KEPT * old + each for old, each in zip(self.sums, new, strict=True))
        self.before = ratio, share

    @property
    def likely(self) -> tuple[float, float]:
        """Seconds lost for one of training, as measured as far as that is surer than what is known before; and the
        standard deviation of that."""
        squares, products, of_ratios, count = self.sums
        if not squares:
            return 1.0, COST_SPREAD
        slope = products / squares
        scatter = max(LEAST_SCATTER**2, (of_ratios - slope * products) / count)
        sure = COST_SPREAD**2 / (COST_SPREAD**2 + scatter / squares)
        return 1.0 + sure * (slope - 1.0), COST_SPREAD * math.sqrt(1.0 - sure)

    @property
    def cost(self) -> float:
        """That which is nearest to one of what may be: a standard deviation more than is likely, and two less."""
        middle, off = self.likely
        return max(LEAST_COST, min(max(1.0, middle - 2 * off), middle + off))

    @property
    def slowdown(self) -> float:
        """Of its steps."""
        lost = max(0.0, self.likely[0]) * self.training
        return lost / (self.all - lost) if self.all > lost else 0.0


class Pace:
    """How fast training goes on a GPU whose rollouts do not drain: their decode steps are slowed down by `budget`, a
    share. On a GPU that gives processes their turns, a step costs them about the time that it takes with the GPU to
    itself, however long it waits for turns: what the quickest took for as many entries. Less or more it costs where
    their own step times surely say so: with training beside them, over those without. Of several servers the one that
    loses most counts.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)  # when each began, its seconds by itself
        self._began: tuple[float, int] | None = None
        self._ended = -math.inf
        self._quickest = math.inf  # seconds an entry
        self._servers: dict[str, _Decoding] = {}
        self._next = -math.inf

    @property
    def cost(self) -> float:
        """Seconds of decoding for a second of training by itself: of what may well be, that which is nearest to one."""
        return max((each.cost for each in self._servers.values()), default=1.0)

    @property
    def slowdown(self) -> float:
        """Of decode steps, lately."""
        return max((each.slowdown for each in self._servers.values()), default=0.0)

    def rests(self, now: float) -> bool:
        """Whether a step is to wait."""
        present = (each for each in self._servers.values() if now - each.at < LONG_S)
        return now < self._next or any(now - each.quiet > QUIET_EVERY_S for each in present)

    def began(self, now: float, entries: int = 0) -> None:
        """A step of so many entries, or a judgement."""
        self._began = now, entries

    def ended(self, now: float, beside: bool = True) -> None:
        """It is over. The first step is nobody's loss: kernels are compiled in it, on the CPU; nor is one that was not
        beside rollouts."""
        assert self._began is not None
        (began, entries), self._began, self._ended = self._began, None, now
        took, is_first = now - began, bool(entries) and self._quickest == math.inf
        if entries:
            self._quickest = min(self._quickest, took / entries)
        if is_first:
            return
        alone = self._quickest * entries if entries else took
        self._steps.append((began, alone))
        if beside:
            # of P seconds in which so many are lost P - lost are left: lost / (P - lost) is the budget
            self._next = max(self._next, began) + self.cost * alone * (1 + 1 / self._budget)

    def heard(self, server: str, decoded: float, expected: float, now: float) -> None:
        """decoded, expected: seconds of its decode steps until now, as `Hello` has them."""
        known = self._servers.get(server)
        if known is None or decoded < known.decoded or expected < known.expected:  # it counts anew
            self._servers[server] = _Decoding(now, decoded, expected)
        elif expected > known.expected:
            took, expects = decoded - known.decoded, expected - known.expected
            # longer ago it had nothing to decode, and training went as fast as it could
            if not 0 < now - known.at < LONG_S or not took < FAR * expects < FAR * FAR * took:
                known.since = known.before = None
            if self._began is None and self._ended <= now - LATE_S:
                self._learn(known, decoded, expected, now)
            known.at, known.decoded, known.expected = now, decoded, expected

    def forget(self, server: str) -> None:
        """It is on no GPU of ours, or gone."""
        self._servers.pop(server, None)

    def _learn(self, of: _Decoding, decoded: float, expected: float, now: float) -> None:
        if of.since is not None:
            at, took, expects = of.since[0], decoded - of.since[1], expected - of.since[2]
            trained = sum(alone for began, alone in self._steps if began >= at) * min(1.0, took / (now - at))
            if not trained:
                of.quiet = now
            of.learn(took / expects, trained / expects)
            of.training, of.all = KEPT * of.training + trained, KEPT * of.all + took
        of.since = now, decoded, expected
