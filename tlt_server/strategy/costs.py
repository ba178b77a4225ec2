"""What a decode step is expected to cost, from timing every arm when the server starts; without timing, a guess."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from statistics import fmean

import msgspec

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import Choice

_PLAIN_S, _PASS, _TOKEN = 0.0047, 0.16, 0.004
"""Seconds of a plain step, and its shares that a drafter's pass and a verified token take: a 7B in bf16, H200."""


class Timing(msgspec.Struct, frozen=True):
    """A timed decode step, of `batch` requests with `cached` tokens in the KV cache in all."""

    arm: Choice
    batch: int
    cached: int
    seconds: float


class StepCosts:
    """Expected seconds of a step, by arm, batch size and cached tokens, in which attention is linear.

    padded: a batch runs at the next batch size that was timed, as CUDA graphs do, and costs as much.

    Raises:
        ConfigError: plain decoding was not timed.
    """

    def __init__(self, timings: Iterable[Timing], *, padded: bool = False) -> None:
        by_arm: dict[Choice, list[Timing]] = defaultdict(list)
        for each in timings:
            by_arm[each.arm].append(each)
        if None not in by_arm:
            raise ConfigError("off was not timed: time plain decoding too, which is what every arm is held against")
        self._lines = {arm: _line(found) for arm, found in by_arm.items()}
        self._padded = padded

    @property
    def arms(self) -> Collection[Choice]:
        """All that were timed."""
        return self._lines.keys()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that any was timed at, ascending."""
        return sorted({size for sizes, _, _ in self._lines.values() for size in sizes})

    def of(self, arms: Collection[Arm]) -> "StepCosts":
        """Of these arms and off alone."""
        some = StepCosts([Timing(None, 1, 0, 0.0)], padded=self._padded)
        some._lines = {arm: line for arm, line in self._lines.items() if arm is None or arm in arms}
        return some

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Of one step. Between timed sizes, and beyond the largest, on a line, but where batches are padded."""
        sizes, seconds, slope = self._lines[arm]
        right = min(bisect_left(sizes, batch), len(sizes) - 1)
        if right == 0 or (self._padded and batch <= sizes[right]):
            return seconds[right] + slope * cached
        share = (batch - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1]) + slope * cached


def _line(timings: Sequence[Timing]) -> tuple[list[int], list[float], float]:
    """Batch sizes, seconds at each without context, and seconds that each cached token adds: one slope for an arm."""
    sizes = sorted({each.batch for each in timings})
    of_size = [[each for each in timings if each.batch == size] for size in sizes]
    means = [(fmean(t.cached for t in each), fmean(t.seconds for t in each)) for each in of_size]
    apart = [(t.cached - m[0], t.seconds - m[1]) for m, each in zip(means, of_size, strict=True) for t in each]
    spread = sum(x * x for x, _ in apart)
    slope = max(0.0, sum(x * y for x, y in apart) / spread) if spread else 0.0
    return sizes, [seconds - slope * cached for cached, seconds in means], slope


def from_passes(target: StepCosts, drafter: StepCosts, arms: Iterable[Arm], batches: Sequence[int]) -> list[Timing]:
    """Steps put together from passes, where a pass takes what its number of tokens takes: on a CPU, without graphs.

    target, drafter: of a pass of either model, as plain decoding of as many requests as the pass has tokens.
    """
    found = [Timing(None, batch, 0, target.seconds(None, batch, 0)) for batch in batches]
    for arm, batch in product(arms, batches):
        verification = target.seconds(None, batch * arm.num_draft_tokens, 0)
        passes = 0 if arm.of_history else arm.num_steps - 1
        drafting = passes * drafter.seconds(None, batch * arm.topk, 0)
        found.append(Timing(arm, batch, 0, verification + drafting + drafter.seconds(None, batch * arm.path, 0)))
    return found


def guessed_costs(arms: Sequence[Arm], largest: int) -> StepCosts:
    """Before any was timed; only ratios count, and those until an arm was measured."""
    shares = {None: (0, 1)} | {arm: (1 if arm.of_history else arm.num_steps, arm.num_draft_tokens) for arm in arms}
    return StepCosts(
        Timing(arm, batch, 0, _PLAIN_S * (1 + _PASS * passes + _TOKEN * batch * tokens))
        for arm, (passes, tokens) in shares.items()
        for batch in {1, largest}
    )
