"""What each arm is expected to make, in tokens per second, before its first pull and after many.

    tokens/s = batch size * accept length / step seconds

The paper keeps rewards, which are this quotient. We keep its two halves apart, because they are learned in different
ways. Accept length is of the drafter and the text, and pools over all buckets (acceptance.py). Step time is of the
machine, known from start-up timing (costs.py) but for a factor that is measured in each bucket (paces.py). So

- every arm has an expected reward before it was ever pulled;
- samples of a whole bucket are pooled without mixing what differs: a pull at batch 20 and one at batch 6 are both held
  against what that very batch, and its cached tokens, should have cost. Raw tokens/s would favour the arm that happened
  to run while the bucket was still full;
- other weights change how much is accepted, and not how long a step takes: only the one half is discounted.
"""

from collections.abc import Iterable

from tlt_server.strategy.acceptance import Acceptance
from tlt_server.strategy.arms import Buckets, Choice
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.curve import Accepted
from tlt_server.strategy.learned import Learned, LearnedPace, LearnedReading
from tlt_server.strategy.paces import Paces

_KEPT = 0.9
"""Of what reading took before, with each time that the drafter reads."""


class Knowledge:
    """Expected rewards of all arms in all buckets.

    costs: of every arm, and of off.
    reading: how long the drafter takes to catch up.
    """

    def __init__(self, buckets: Buckets, costs: StepCosts) -> None:
        self._costs = costs
        self.acceptance = Acceptance(arm for arm in costs.arms if arm is not None)
        self.reading = Reading()
        self.buckets = buckets
        self._paces = [Paces(costs.arms) for _ in buckets.all]

    def observe(self, arm: Choice, batch: int, cached: int, accepted: Accepted, seconds: float | None) -> None:
        """One settled decode step.

        Args:
            arm: it was launched with.
            batch: requests in it.
            cached: tokens in the KV cache, of them all.
            accepted: of those requests that count, at least one.
            seconds: it took; None where that was not the arm's doing. What was accepted counts all the same.
        """
        self.acceptance.observe(arm, batch, accepted)
        if seconds is not None:
            ratio = seconds / self._costs.seconds(arm, batch, cached)
            self._paces[self.buckets.index(batch)].observe(arm, ratio)

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected of a step."""
        return self._costs.seconds(arm, batch, cached) * self._paces[self.buckets.index(batch)].factor(arm)

    def rate(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected tokens per second, of all requests together."""
        return self.rates((arm,), batch, cached)[arm]

    def rates(self, arms: Iterable[Choice], batch: int, cached: int) -> dict[Choice, float]:
        """Likewise, of each of these arms."""
        factor, length = self._paces[self.buckets.index(batch)].factor, self.acceptance.length
        seconds = self._costs.seconds
        return {arm: batch * length(arm) / (seconds(arm, batch, cached) * factor(arm)) for arm in arms}

    def learned(self) -> Learned:
        """All of it, to be restored."""
        found = (
            LearnedPace(first, arm, mean)
            for first, paces in zip(self.buckets.firsts, self._paces, strict=True)
            for arm, mean in paces.known().items()
        )
        return Learned(self.acceptance.learned(), tuple(found), self.reading.learned())

    def restore(self, learned: Learned) -> None:
        """Takes over what was learned of the arms and buckets that there still are."""
        self.acceptance.restore(learned.acceptance)
        self.reading.restore(learned.reading)
        for each in learned.paces:
            bucket = self.buckets.index(each.first)
            if self.buckets.firsts[bucket] == each.first and each.arm in self._costs.arms:
                self._paces[bucket].restore(each.arm, each.mean)


class Reading:
    """How long the drafter takes to read what it missed, before a step with an arm.

    All seconds over all tokens, what is older for less: of a few tokens nobody could tell it from a step's scatter.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """So many took so long, or seemed to."""
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Expected; 0 as long as nothing is known."""
        return max(0.0, self._seconds) * tokens / self._tokens if self._tokens else 0.0

    def learned(self) -> LearnedReading:
        """To be restored."""
        return LearnedReading(self._tokens, self._seconds)

    def restore(self, learned: LearnedReading) -> None:
        """Takes over what was learned."""
        self._tokens, self._seconds = learned.tokens, learned.seconds
