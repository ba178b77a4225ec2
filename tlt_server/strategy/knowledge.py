"""What each arm is expected to make, in tokens per second, before its first pull and after many.

    tokens/s = batch size * accept length / step seconds

The paper keeps rewards, which are this quotient. We keep its two halves apart, because they are learned in different
ways. Accept length is of the drafter and the text, and pools over all buckets (acceptance.py). Step time is of the
machine, known from start-up timing (costs.py) but for a factor that is measured: the arm's pace in the bucket. So

- every arm has an expected reward before it was ever pulled;
- samples of a whole bucket are pooled without mixing what differs: a pull at batch 20 and one at batch 6 are both held
  against what that very batch, and its cached tokens, should have cost. Raw tokens/s would favour the arm that happened
  to run while the bucket was still full;
- other weights change how much is accepted, and not how long a step takes: only the one half is discounted.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from tlt_server.strategy.acceptance import Acceptance
from tlt_server.strategy.arms import Buckets, Choice
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.curve import Accepted
from tlt_server.strategy.learned import Learned, LearnedPace

WINDOW = 15
"""Step times that a pace is the median of, while they are recent."""
_ALWAYS = 5
"""Of an arm that is seldom pulled, so many however old: two outliers leave their median alone."""
_RECENT = 100
"""Decode steps. What slows a step is often that others use the machine, which slows every arm for a while. The arm that
ran then is left for one that was not seen to be slower, and forgiven as soon as a few looks outvote what is old."""
_IN_A_ROW, FAR = 3, 1.5
"""So many steps in a row that take so many times as long as expected, or as short, are no outliers: the arm has
changed, and what was before is forgotten."""


class Pace:
    """An arm's measured step times in one bucket, each over what was expected of its batch: 1.1 is a tenth slower.

    A median: a step that waited for something else says nothing of the arm. It starts with two samples that say what
    timing said, so that one outlier at the very first pull does not condemn an arm.
    """

    def __init__(self, ratios: Sequence[float] = (1.0, 1.0)) -> None:
        self._ratios = deque(ratios, maxlen=WINDOW)
        self._steps = deque([0] * len(ratios), maxlen=WINDOW)  # at which each was measured
        self.value = median(ratios)

    def add(self, ratio: float, step: int) -> None:
        """A measured step; `step` counts the decode steps of the server."""
        self._ratios.append(ratio)
        self._steps.append(step)
        if not self.value / FAR <= ratio <= self.value * FAR:
            newest = self.ratios[-_IN_A_ROW:]
            if min(newest) > self.value * FAR or max(newest) < self.value / FAR:
                self._keep_newest(_IN_A_ROW)
        while len(self._steps) > _ALWAYS and self._steps[0] < step - _RECENT:
            self._keep_newest(len(self._steps) - 1)
        self.value = median(self._ratios)

    @property
    def ratios(self) -> list[float]:
        """Oldest first."""
        return list(self._ratios)

    def _keep_newest(self, count: int) -> None:
        while len(self._ratios) > count:
            self._ratios.popleft()
            self._steps.popleft()


class Knowledge:
    """Expected rewards of all arms in all buckets.

    costs: of every arm, and of off.
    """

    def __init__(self, buckets: Buckets, costs: StepCosts) -> None:
        self._costs = costs
        self.acceptance = Acceptance(arm for arm in costs.arms if arm is not None)
        self._buckets = buckets
        self._paces: list[dict[Choice, Pace]] = [{arm: Pace() for arm in costs.arms} for _ in buckets.all]
        self._step = 0

    def observe(self, arm: Choice, batch: int, cached: int, accepted: Accepted, seconds: float | None) -> None:
        """One settled decode step.

        Args:
            arm: it was launched with.
            batch: requests in it.
            cached: tokens in the KV cache, of them all.
            accepted: of those requests that count, at least one.
            seconds: it took; None where that was not the arm's doing. What was accepted counts all the same.
        """
        self._step += 1
        self.acceptance.observe(arm, batch, accepted)
        if seconds is not None:
            pace = self._paces[self._buckets.index(batch)][arm]
            pace.add(seconds / self._costs.seconds(arm, batch, cached), self._step)

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected of a step."""
        return self._costs.seconds(arm, batch, cached) * self._paces[self._buckets.index(batch)][arm].value

    def rate(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected tokens per second, of all requests together."""
        return self.rates((arm,), batch, cached)[arm]

    def rates(self, arms: Iterable[Choice], batch: int, cached: int) -> dict[Choice, float]:
        """Likewise, of each of these arms."""
        paces, length, seconds = self._paces[self._buckets.index(batch)], self.acceptance.length, self._costs.seconds
        return {arm: batch * length(arm) / (seconds(arm, batch, cached) * paces[arm].value) for arm in arms}

    def learned(self) -> Learned:
        """All of it, to be restored."""
        paces = (
            LearnedPace(first, arm, tuple(pace.ratios))
            for first, arms in zip(self._buckets.firsts, self._paces, strict=True)
            for arm, pace in arms.items()
        )
        return Learned(self.acceptance.learned(), tuple(paces))

    def restore(self, learned: Learned) -> None:
        """Takes over what was learned of the arms and buckets that there still are."""
        self.acceptance.restore(learned.acceptance)
        for each in learned.paces:
            bucket = self._buckets.index(each.first)
            if self._buckets.firsts[bucket] == each.first and each.arm in self._costs.arms and each.ratios:
                self._paces[bucket][each.arm] = Pace(each.ratios)
