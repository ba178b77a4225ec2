"""Spot training: which GPUs train while their rollouts have drained, and give them back when they are needed.

    state      means                                    leaves when
    BUSY       serves, or is not heard of               no load for `settle` seconds -> IDLE
    IDLE       has drained                              load, silence -> BUSY; enough are idle -> Start, TRAINING
    TRAINING   trains, or is about to stop              load or silence -> Yield; `yielded` -> BUSY

A worker that is told to yield stays TRAINING until it says that it has; past its deadline that is `Overdue`, once: who
runs it then ends it, and says `yielded` for it. Nothing here reads a clock or waits: every call is given the time, and
returns what is to be done. Times are seconds of any clock that does not go back.
"""

import math
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
