"""What each arm is expected to make: batch size * accept length / step seconds, whose halves are learned apart.

Accept length pools over all buckets (acceptance.py). Step time is what timing said (costs.py) times a ratio, learned in
each bucket, of two parts in logarithms: one of all arms alike, as requests grow long or others use the machine, and an
arm's own beside it. So the active arm tells the former and an exploration step its arm's own.
"""

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from typing import Annotated

import msgspec

from tlt_server.strategy.acceptance import Acceptance, Filter
from tlt_server.strategy.arms import Buckets, Choice
from tlt_server.strategy.costs import StepCosts

_SCATTER = 0.03**2
"""Variance of the logarithm of one step's time."""
_COMMON_DRIFT, _OWN_DRIFT = 0.01**2, 0.001**2
"""Variance that a step of the bucket adds: the common part is of the last few, an arm's own of the last thousand."""
_UNKNOWN, _UNKNOWN_COMMON, _MOST = 0.1**2, 0.03**2, 0.05**2
"""Variance before anything was measured, and the most that an own part's drifts to, or has after a restart. Timing
knows the GPU's part alone: taken for an own part at first, so that arms never pulled seem too good, and are tried."""
_CLIP, _IN_A_ROW, _LONG, FAR = 2.5, 3, 5, 1.5
"""Standard deviations that an error counts for at most, until so many in a row say so; the common part is believed to
move where its arm has decoded for longer than an exploration, by less than others on the machine could do."""
_READING_KEPT = 0.9
"""Of what reading took before, with each time that the drafter reads what it missed."""


class Learned(msgspec.Struct, frozen=True):
    """All that is worth keeping over a restart, as JSON can hold it.

    trials, hits: of chains' drafts by position. leads: means and variances, the level's under no arm. ratios: by a
    bucket's first batch size and arm, the logarithm of the step-time ratio. reading: tokens, and their seconds.
    """

    trials: tuple[Annotated[float, msgspec.Meta(ge=0, le=1e9)], ...]
    hits: tuple[Annotated[float, msgspec.Meta(ge=0, le=1e9)], ...]
    leads: tuple[
        tuple[Choice, Annotated[float, msgspec.Meta(ge=-100, le=100)], Annotated[float, msgspec.Meta(ge=0, le=100)]],
        ...,
    ]
    ratios: tuple[tuple[int, Choice, Annotated[float, msgspec.Meta(ge=-14, le=14)]], ...]
    reading: tuple[Annotated[float, msgspec.Meta(ge=0, le=1e9)], Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]]

    def __post_init__(self) -> None:
        if len(self.hits) != len(self.trials) or any(h > t for h, t in zip(self.hits, self.trials, strict=True)):
            raise ValueError(f"hits {self.hits} of trials {self.trials}: as many numbers, and none above its trials")


class StepTimes:
    """The ratios of one bucket."""

    def __init__(self, arms: Iterable[Choice]) -> None:
        self.part = {arm: part for part, arm in enumerate(arms, start=1)}
        others = len(self.part)
        most = [float("inf")] + [_MOST] * others
        self.filter = Filter([0.0] * (others + 1), [_UNKNOWN_COMMON] + [_UNKNOWN] * others, most)
        self._far: dict[Choice, list[float]] = {arm: [] for arm in self.part}
        self._newest: Choice = None
        self._row = 0
        self._settled: Choice = None

    def observe(self, arm: Choice, ratio: float) -> None:
        """A step took so many times as long as was expected of its arm."""
        self._row = self._row + 1 if arm == self._newest else 1
        self._newest = arm
        if self._row > _LONG:
            self._settled = arm
        self.filter.drift(_COMMON_DRIFT, _OWN_DRIFT)
        self.filter.learn(self.part[arm], self._clipped(arm, log(ratio) - self.known(arm)), _SCATTER)

    def known(self, arm: Choice) -> float:
        """The logarithm of how many times as long as timing said a step takes now."""
        return self.filter.mean[0] + self.filter.mean[self.part[arm]]

    def _clipped(self, arm: Choice, error: float) -> float:
        part, far, known = self.part[arm], self._far[arm], self.filter.covariance
        most = _CLIP * sqrt(known[0][0] + 2 * known[0][part] + known[part][part] + _SCATTER)
        if abs(error) <= most or (far and far[-1] * error < 0):
            far.clear()
        if abs(error) <= most:
            return error
        far.append(error)
        if len(far) < _IN_A_ROW:
            return most if error > 0 else -most
        error = min(far, key=abs)
        far.clear()
        if arm == self._settled and abs(error) < log(FAR):
            part = 0
        known[part][part] += error * error
        return error


class Estimates:
    """Expected rewards of all arms in all buckets. costs: of every arm, and of off."""

    def __init__(self, buckets: Buckets, costs: StepCosts) -> None:
        self.buckets, self._costs = buckets, costs
        self.acceptance = Acceptance(arm for arm in costs.arms if arm is not None)
        self._times = [StepTimes(costs.arms) for _ in buckets.all]
        self._reading = 0.0, 0.0

    def observe(self, arm: Choice, batch: int, cached: int, accepted: Sequence[int], seconds: float | None) -> None:
        """A settled step; no seconds where they were not the arm's doing."""
        self.acceptance.observe(arm, accepted)
        if seconds is not None:
            self._times[self.buckets.index(batch)].observe(arm, seconds / self._costs.seconds(arm, batch, cached))

    def read(self, tokens: int, seconds: float) -> None:
        """The drafter read so many tokens that it had missed, or seemed to take so long for them."""
        self._reading = _READING_KEPT * self._reading[0] + tokens, _READING_KEPT * self._reading[1] + seconds

    def reading(self, tokens: int) -> float:
        """Seconds expected for that; 0 as long as nothing is known."""
        return max(0.0, self._reading[1]) * tokens / self._reading[0] if self._reading[0] else 0.0

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected of a step."""
        return self._costs.seconds(arm, batch, cached) * exp(self._times[self.buckets.index(batch)].known(arm))

    def rates(self, arms: Iterable[Choice], batch: int, cached: int) -> dict[Choice, float]:
        """Expected tokens per second, of all requests together."""
        lengths = self.acceptance.lengths
        return {arm: batch * lengths[arm] / self.seconds(arm, batch, cached) for arm in arms}

    def learned(self) -> Learned:
        """All of it, to be restored."""
        acceptance, level = self.acceptance, self.acceptance.filter
        parts = [(None, 0), *((arm, part) for arm, part in acceptance.part.items() if part)]
        return Learned(
            tuple(acceptance.trials),
            tuple(acceptance.hits),
            tuple((arm, level.mean[part], level.covariance[part][part]) for arm, part in parts),
            tuple(
                (first, arm, times.known(arm))
                for first, times in zip(self.buckets.firsts, self._times, strict=True)
                for arm, part in times.part.items()
                if times.filter.covariance[part][part] < _UNKNOWN
            ),
            self._reading,
        )

    def restore(self, learned: Learned) -> None:
        """Takes over what was learned of the arms and buckets that there still are."""
        acceptance, level = self.acceptance, self.acceptance.filter
        depth = min(len(acceptance.trials), len(learned.trials))
        acceptance.trials[:depth], acceptance.hits[:depth] = learned.trials[:depth], learned.hits[:depth]
        for arm, mean, variance in learned.leads:
            if arm is None or arm in acceptance.part:
                part = 0 if arm is None else acceptance.part[arm]
                level.mean[part], level.covariance[part][part] = mean, variance
        acceptance.refresh()
        for first, arm, mean in learned.ratios:
            times = self._times[self.buckets.index(first)]
            if first in self.buckets.firsts and arm in times.part:
                times.filter.mean[times.part[arm]] = mean
                times.filter.covariance[times.part[arm]][times.part[arm]] = _MOST
        self._reading = learned.reading
