"""A simulated server under a selector, and what each of its steps lost against the best arm."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from tlt_client.schemas import StrategyUpdate

from benchmarks.simulation.world import BATCHES, CAPTURED, World
from tlt_server.strategy.arms import Bucket, Buckets, Choice
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.defaults import default_buckets
from tlt_server.strategy.selector import Selector

WINDOW = 128
"""Tokens of a request that the drafter reads of what it missed, at most: engine/missed.py's."""


PREFILL_S = 0.025
"""The launch of a prefill, kernel by kernel. Made up: longer than most steps, whose results wait for it then."""


class Step(NamedTuple):
    """A decode step.

    seconds: it took, what the drafter read first included.
    tokens: it gave, of all requests together.
    rate: mean tokens per second of its arm, in the world as it was; best: of the bucket's best arm.
    reading: seconds in which the drafter read what it had missed.
    """

    arm: Choice
    batch: int
    seconds: float
    tokens: int
    rate: float
    best: float
    reading: float


def regret(steps: Iterable[Step]) -> float:
    """The share of the time that was lost: how much sooner the best arm would have made as many tokens."""
    steps = list(steps)
    lost = sum(s.seconds - (s.seconds - s.reading) * s.rate / s.best for s in steps)
    return lost / sum(s.seconds for s in steps)


class Server:
    """Just started: its arms were timed, and nothing was served yet.

    The launch of a step before which the drafter reads waits for that: the result of the step before is settled late.
    So does a prefill's, which is launched kernel by kernel.

    buckets: None for those that it makes itself. Its steps are then held against all arms, else against their bucket's.
    ends: tokens after which a request ends on average, and another one is prefilled in its place; None: it goes on.
    """

    def __init__(
        self,
        world: World,
        settings: StrategyUpdate,
        buckets: Sequence[Bucket] | None = None,
        ends: float | None = None,
    ) -> None:
        costs = StepCosts(world.timed_at_start(), padded=True)
        own = buckets or default_buckets(costs, CAPTURED, max(BATCHES))
        self.buckets = Buckets(own, max(BATCHES))
        self.selector = Selector(costs, CAPTURED, max(BATCHES), own, Random(world.random.random()))
        self.selector.configure(settings)
        self._world, self._given = world, buckets is not None
        self._now = self._free = 0.0  # the end of the newest step, and of the one before, when the next can be launched
        self._waiting: tuple[int, list[int]] | None = None
        self._missed = 0  # tokens of each request
        self._ends = ends

    def step(self, levels: list[int], cached: int) -> tuple[Step, list[int]]:
        """One decode step, launched before the result of the one before is settled, and its accepted drafts.

        Args:
            levels: of its requests (world.py), changed in place.
            cached: tokens in the KV cache, of them all.
        """
        batch = len(levels)
        if self._waiting is not None and self._someone_ended(self._waiting):
            self.selector.interrupted()
            self._now = max(self._now, self._free + PREFILL_S)
            self.selector.settled(*self._waiting, self._now)
            self._free, self._waiting = self._now, None
            self._now += PREFILL_S / 2  # on the GPU
        arm = self.selector.table().arm(batch)
        behind = batch * self._missed
        self.selector.launched(arm, batch, cached, self._free, behind)
        reading = self._world.reading(behind) if arm else 0.0
        self._missed = 0 if arm else min(self._missed + 1, WINDOW)
        self._now += reading
        if self._waiting is not None:
            self.selector.settled(*self._waiting, self._now)
        accepted, seconds = self._world.step(arm, levels, cached)
        self._free, self._now = self._now, self._now + seconds
        self._waiting = batch, accepted
        best = max(self._world.rate(each, batch, cached) for each in self._rivals(batch))
        rate = self._world.rate(arm, batch, cached)
        return Step(arm, batch, reading + seconds, batch + sum(accepted), rate, best, reading), accepted

    def _someone_ended(self, result: tuple[int, list[int]]) -> bool:
        """Within a step's tokens."""
        batch, accepted = result
        tokens = batch + sum(accepted)
        return self._ends is not None and self._world.random.random() > (1 - 1 / self._ends) ** tokens

    def _rivals(self, batch: int) -> list[Choice]:
        if self._given:
            return list(self.buckets.all[self.buckets.index(batch)].arms)
        return [None, *(arm for arm, most in CAPTURED.items() if batch <= most)]
