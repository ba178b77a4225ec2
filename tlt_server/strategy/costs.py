"""What a decode step is expected to cost, from timing every arm when the server starts.

Where the cost lies is known before anything was served: the same weights are read and the same kernels run whatever
the tokens say. Timing an arm on dummy input at each captured batch size gives the cost of a short context; timed at a
second context as well, it would give what each cached token adds. The server times one (engine/timing.py): what longer
contexts add shows as a level that is higher for all arms (paces.py), and what they add to one more than to another, in
looks.

Why context enters here and not as a dimension of the buckets: on an H200 the best arm does change with it (at 32
requests chain 3,1,4 is 1.5 times as fast as plain decoding at 512 tokens, and 0.74 at 32k), so it cannot be left out.
But a step's time is linear in the cached tokens of the whole batch: attention reads each of them once in a pass. One
slope for each arm says as much as a row of buckets, and does not split the samples. The measurements are in
benchmarks/results/context.h200.json; tests/strategy/test_costs.py says how well lines fit them.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from itertools import product

import msgspec

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import Choice


class Timing(msgspec.Struct, frozen=True):
    """A timed decode step: draft, verify and draft-extend, or plain decoding.

    cached: tokens in the KV cache, of all requests together.
    """

    arm: Choice
    batch: int
    cached: int
    seconds: float


class StepCosts:
    """Expected seconds of a step, by arm, batch size and cached tokens.

    padded: a batch runs at the next batch size that was timed, as CUDA graphs do, and costs as much.

    Raises:
        ConfigError: plain decoding was not timed.
    """

    def __init__(self, timings: Iterable[Timing], *, padded: bool = False) -> None:
        by_arm: dict[Choice, list[Timing]] = defaultdict(list)
        for timing in timings:
            by_arm[timing.arm].append(timing)
        self._lines = {arm: _Line(found, padded) for arm, found in by_arm.items()}
        if None not in self._lines:
            raise ConfigError("off was not timed: time plain decoding too, which is what every arm is held against")

    @property
    def arms(self) -> Collection[Choice]:
        """All that were timed."""
        return self._lines.keys()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that any was timed at, ascending."""
        return sorted({size for line in self._lines.values() for size in line.batches})

    def of(self, arms: Collection[Arm]) -> "StepCosts":
        """Of these arms and off alone."""
        some = copy(self)
        some._lines = {arm: line for arm, line in self._lines.items() if arm is None or arm in arms}
        return some

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Of one step, for a batch of so many requests with so many cached tokens in all."""
        return self._lines[arm].seconds(batch, cached)


def from_passes(target: StepCosts, drafter: StepCosts, arms: Iterable[Arm], batches: Sequence[int]) -> list[Timing]:
    """Steps put together from passes, where a pass takes what its number of tokens takes: on a CPU, without graphs.

    Args:
        target, drafter: of a pass of either model, as plain decoding of as many requests as the pass has tokens.
    """
    found = [Timing(None, batch, 0, target.seconds(None, batch, 0)) for batch in batches]
    for arm, batch in product(arms, batches):
        verification = target.seconds(None, batch * arm.num_draft_tokens, 0)
        drafting = (arm.num_steps - 1) * drafter.seconds(None, batch * arm.topk, 0)
        draft_extend = drafter.seconds(None, batch * arm.path, 0)
        found.append(Timing(arm, batch, 0, verification + drafting + draft_extend))
    return found


class _Line:
    """One arm: seconds linear in cached tokens.

    batches: that were timed, ascending. Between two of them seconds are linear in the batch size, or, padded, those of
        the larger one; beyond the largest they lie on the line through the last two.
    """

    def __init__(self, timings: list[Timing], padded: bool) -> None:
        by_batch: dict[int, list[Timing]] = defaultdict(list)
        for timing in timings:
            by_batch[timing.batch].append(timing)
        means = {batch: _means(found) for batch, found in by_batch.items()}
        apart = [
            (each.cached - means[each.batch][0], each.seconds - means[each.batch][1])
            for each in timings
            if len(by_batch[each.batch]) > 1
        ]
        spread = sum(x * x for x, _ in apart)
        self._slope = max(0.0, sum(x * y for x, y in apart) / spread) if spread else 0.0
        points = [(batch, seconds - self._slope * cached) for batch, (cached, seconds) in sorted(means.items())]
        self.batches = [batch for batch, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._padded = padded

    def seconds(self, batch: int, cached: int) -> float:
        batches, seconds, more = self.batches, self._seconds, self._slope * cached
        right = bisect_left(batches, batch)
        if right < len(batches) and (self._padded or batches[right] == batch or right == 0):
            return more + seconds[right]
        right = min(right, len(batches) - 1)
        if right == 0:
            return more + seconds[0]
        share = (batch - batches[right - 1]) / (batches[right] - batches[right - 1])
        return more + seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


def _means(timings: list[Timing]) -> tuple[float, float]:
    return sum(t.cached for t in timings) / len(timings), sum(t.seconds for t in timings) / len(timings)
