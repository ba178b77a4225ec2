"""With which arm decode steps speculate: as the strategy chooses, unless something speaks against any.

All ranks of a model switch at the same step. What is asked for, and what holds speculation off, reaches all of them
between the same two steps; where that fixes the arms, each rank knows them. Where arms are learned, rank 0 alone times,
counts and draws; what it decides is announced to all, itself included, with the requests that a scheduler's loop
broadcasts before each step (`Announcer`).
"""

import time
from collections import deque
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

from msgspec.structs import replace
from tlt_client import schemas
from tlt_client.schemas import StrategyUpdate

from tlt_server.config import Arm
from tlt_server.engine.events import EventLog
from tlt_server.metrics import count_step
from tlt_server.strategy.arms import ArmTable, Choice
from tlt_server.strategy.costs import guessed_costs
from tlt_server.strategy.defaults import default_buckets, untimed_buckets
from tlt_server.strategy.estimates import Learned
from tlt_server.strategy.selector import Selector
from tlt_server.strategy.settings import to_client

LEARNED = ("bandit", "paper")
"""Modes in which rank 0 decides by what it has seen."""
OFF = ArmTable((1,), (None,))
_TIMED_STEPS = 1000
COLD = 8
"""Steps that teach nothing, the first ones: of the request that SGLang warms up with, eight tokens of nobody's text.
They take much longer than later ones, and an arm that seems so slow is not tried again for long."""


class Speculation:
    """The strategy of one scheduler process.

    worker: `EagleWorker`, which decodes by its `table`; None: the server was started without a drafter. largest: batch
    size. leads: this is the rank that decides. held: why steps do not speculate, whatever is asked for.
    on: decode steps may speculate, and the drafter may draft for them.
    """

    def __init__(self, worker: Any, largest: int, events: EventLog, *, leads: bool = True) -> None:
        self._worker, self._events, self._leads = worker, events, leads
        self.held: str | None = None
        self._selector: Selector | None = None
        self._wished = StrategyUpdate("off")
        self.on = worker is not None
        self._last: Arm | None = None
        # seconds: of the newest reading of the table; since the last result, in all
        self._reading = self._choosing = 0.0
        self._selecting: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._cold_launched = self._cold_settled = COLD
        if worker is not None:
            self._selector = _selector(worker, largest)
            self._last = worker.all_arms[0]
            self._wished = self._settled_for(StrategyUpdate("bandit" if worker.chooses else "pinned"))
            self._selector.configure(self._wished)

    def describe(self) -> schemas.Speculation:
        """As our routes show it."""
        if self._selector is None:
            return schemas.Speculation("off", False, None, None)
        arms = tuple(client for arm in self._worker.all_arms if (client := to_client(arm)))
        last = to_client(self._last)
        selecting_us = 1e6 * fmean(self._selecting) if self._selecting else None
        mode, report = self._wished.mode, replace(self._selector.report(), selecting_us=selecting_us)
        return schemas.Speculation(mode, self.on, self.held, last, arms, report, self._worker.graphs)

    def step_times(self) -> schemas.StepTimes:
        """Nothing, where no arm is."""
        return schemas.StepTimes(0.0, 0.0) if self._selector is None else self._selector.step_times()

    def wish(self, update: StrategyUpdate) -> None:
        """What is asked for. Raises ConfigError: it has faults, all of which are named, and nothing was changed."""
        assert self._selector is not None
        update = self._settled_for(update)
        self._selector.configure(update)
        self._selecting.clear()
        self._wished = update
        self._apply("it was asked for")

    def learned(self) -> Learned:
        """What a restart needs in order to be warm."""
        assert self._selector is not None
        return self._selector.learned()

    def learn(self, learned: Learned) -> None:
        """Goes on from what was learned before, here or on a server like this one."""
        assert self._selector is not None
        self._selector.restore(learned)

    def hold(self, why: str) -> None:
        """Keeps the drafter from drafting, whatever is asked for, until it is released; history may go on."""
        self.held = why
        self._let_draft(False)
        self._apply(why)

    def release(self, why: str) -> None:
        """Nothing speaks against speculation any more."""
        self.held = None
        self._let_draft(True)
        self._apply(why)

    @property
    def there(self) -> bool:
        """Whether the server was started with anything that drafts."""
        return self._worker is not None

    # -- what rank 0 decides --

    def announcement(self) -> ArmTable | None:
        """What all ranks are to decode by from the next step on; None where they do, or where others decide."""
        if not self._leads or not self._learns:
            return None
        assert self._selector is not None
        began = time.perf_counter()
        if self._worker.history is not None and (lengths := self._worker.history.foreseen()) is not None:
            self._selector.foresee(lengths)
        table = self._selector.table()
        self._reading = time.perf_counter() - began  # not summed: a scheduler without requests asks all the time
        return None if table == self._worker.table else table

    def hear(self, table: ArmTable) -> None:
        """An announcement. One that something else has overtaken says nothing."""
        if self._learns:
            self._worker.table = table

    # -- what is seen --

    def launched(self, arm: Choice, batch: int, cached: int, behind: int = 0) -> None:
        """A decode step begins, of so many requests with so many cached tokens in all. behind: tokens that the drafter
        has missed; an arm's step begins with reading them."""
        self._last = arm or self._last
        if self._leads and self._selector is not None:
            count_step(arm)
            if self._cold_launched:
                self._cold_launched -= 1
                return
            now = time.perf_counter()
            self._selector.launched(arm, batch, cached, now, behind)
            self._choosing += self._reading + time.perf_counter() - now

    def settled(self, batch: int, accepted: Sequence[int], late: bool = False) -> None:
        """A decode step's result is on the CPU: accepted drafts of each request that counts. late: as `Selector`'s."""
        if self._cold_settled:
            self._cold_settled -= 1
        elif self._leads and self._selector is not None:
            now = time.perf_counter()
            self._selector.settled(batch, accepted, now, late)
            self._selecting.append(self._choosing + time.perf_counter() - now)
            self._choosing = 0.0

    def interrupted(self) -> None:
        """Something else than a decode step begins: a prefill, an update, a pause."""
        if self._leads and self._selector is not None:
            began = time.perf_counter()
            self._selector.interrupted()
            self._choosing += time.perf_counter() - began

    def weights_changed(self) -> None:
        """Another target or drafter is active."""
        self.interrupted()
        if self._leads and self._selector is not None:
            self._selector.weights_changed()

    # -- within --

    @property
    def _learns(self) -> bool:
        return self._may and self._wished.mode in LEARNED

    @property
    def _may(self) -> bool:
        """Whether anything may draft."""
        return self.held is None or (self._worker is not None and self._worker.history is not None)

    def _let_draft(self, on: bool) -> None:
        if self._selector is not None:
            self._selector.let_draft(on)

    def _settled_for(self, update: StrategyUpdate) -> StrategyUpdate:
        if update.mode == "pinned" and update.pinned is None:
            return replace(update, pinned=to_client(self._worker.all_arms[0]))
        return update

    def _apply(self, why: str) -> None:
        if self._worker is None:
            return
        assert self._selector is not None
        on = self._wished.mode != "off" and self.held is None
        if not on:
            self._worker.table = OFF
        if self._may and not self._learns:
            self._worker.table = self._selector.table()
        if on != self.on:
            self.on = on
            self._events.add("speculation_on" if on else "speculation_off", why=why)


class Announcer:
    """Adds to what rank 0 received what it has decided; stands where SGLang lets requests be held back."""

    def __init__(self, scheduler: Any) -> None:
        self._blocker = scheduler.input_blocker
        self._state = scheduler.weight_updater.state

    def handle(self, recv_reqs: list[Any] | None) -> list[Any] | None:
        """Before they are broadcast; on ranks that receive nothing themselves, None."""
        from sglang.srt.managers.io_struct import TltReqInput

        from tlt_server.engine.messages import Announce, Probe, pack

        if self._blocker is not None:
            recv_reqs = self._blocker.handle(recv_reqs)
        if recv_reqs is None:
            return None
        if (why := self._state.probe_due()) is not None:
            recv_reqs.append(TltReqInput(body=pack(Probe(why))))
        if (table := self._state.speculation.announcement()) is not None:
            recv_reqs.append(TltReqInput(body=pack(Announce(table))))
        return recv_reqs


def _selector(worker: Any, largest: int) -> Selector:
    captured, costs = worker.captured, worker.costs
    if costs is None:
        costs, buckets = guessed_costs(worker.all_arms, largest), untimed_buckets(captured, largest)
    else:
        buckets = default_buckets(costs, captured, largest)
    return Selector(costs, captured, largest, buckets, Random(0))
