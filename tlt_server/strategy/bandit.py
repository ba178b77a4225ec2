"""Mode `bandit`: BEG-MAB, with what the paper leaves open decided for a server that pays for every experiment.

The *active* arm of a bucket is the one of the highest expected reward; another takes over where it is expected to be
better by a margin. *Exploration steps* go to the arm of the highest expected reward plus a bonus that grows with the
steps since it was pulled (an upper confidence bound), where a budget affords them: a share of decoding time, of which
an exploration step is charged what it loses, its seconds less those in which the active arm would have made as many
tokens. So near rivals are tried often, hopeless arms seldom, and each some time, for any may become the best.
"""

from math import sqrt

from tlt_server.strategy.arms import ArmTable, Buckets, Choice
from tlt_server.strategy.estimates import FAR, Estimates
from tlt_server.strategy.pulls import Pull

MARGIN = 0.02
"""How much better a rival must be: two well known arms scatter by about so much."""
BONUS, WORTH = 0.04, 0.2
"""Share of the best reward for the root of one step; and what must be gained to explore, for many requests. One request
gets all that the budget affords: one verify scatters by half its mean."""
LEAST = 0.1
"""Of an exploration step's time, charged however good the arm: what bounds how often it is done."""
SAVED_S, RESERVED_S, LAID_BY = 10.0, 3.0, 0.15
"""Decoding whose share may be saved up; and laid by, of so much of what is earned, for when other weights come."""


class Bandit:
    """Decides on rank 0. share: of decoding time that exploration may lose, 0 to 1. spent: seconds that it lost."""

    def __init__(self, buckets: Buckets, estimates: Estimates, share: float) -> None:
        self._buckets, self._estimates, self._share = buckets, estimates, share
        self.spent = self._left = self._reserve = 0.0
        self._steps = [0] * len(buckets.all)
        self._pulled: list[dict[Choice, int]] = [dict.fromkeys(bucket.arms, 0) for bucket in buckets.all]
        sizes = zip(buckets.all, buckets.lasts, strict=True)
        self._active = [_best(estimates.rates(bucket.arms, last, 0)) for bucket, last in sizes]
        self._exploring: tuple[int, Choice] | None = None
        self._steps_left = 0
        self._unread = False  # whether the newest step was an exploration of off, after which the drafter reads
        self._new_weights = True  # since the last exploration

    def table(self) -> ArmTable:
        """What each bucket does next."""
        arms = list(self._active)
        if self._exploring is not None:
            arms[self._exploring[0]] = self._exploring[1]
        return ArmTable(self._buckets.firsts, tuple(arms))

    def launched(self, arm: Choice, batch: int, cached: int, behind: int) -> float:
        """A step begins. Returns seconds of the budget that are held for it, 0 where it explores nothing."""
        bucket = self._buckets.index(batch)
        active, unread = self._active[bucket], self._unread
        self._steps[bucket] += 1
        self._pulled[bucket][arm] = self._steps[bucket]
        self._steps_left -= 1
        if self._steps_left <= 0 or self._exploring != (bucket, arm):
            self._exploring = None
        self._unread = arm is None and active is not None
        reading = self._estimates.reading(behind) if arm else 0.0
        charge = reading if unread else 0.0
        if arm != active:
            charge = self._lost(arm, batch, cached, self._estimates.seconds(arm, batch, cached) + reading)
        self._left -= charge
        return charge

    def settled(self, pull: Pull, seconds: float | None, took: float | None) -> None:
        """A step's result has been learned from.

        Args:
            seconds: since the result before. took: the step, with what the drafter read first. None: not known.
        """
        if seconds is not None:
            earned = self._share * seconds
            laid_by = min(LAID_BY * earned, self._share * RESERVED_S - self._reserve)
            self._reserve += laid_by
            self._left = min(self._left + earned - laid_by, self._share * SAVED_S)
        if not pull.charged:
            return
        lost = pull.charged
        if took is not None and pull.arm != self._active[self._buckets.index(pull.batch)]:
            self._new_weights = False
            lost = self._lost(pull.arm, pull.batch, pull.cached, took)
            if took < self._estimates.seconds(pull.arm, pull.batch, pull.cached) / FAR:
                # explored again at once: it takes a few to be believed
                self._pulled[self._buckets.index(pull.batch)][pull.arm] = 0
        elif took is not None:
            lost = min(lost, max(0.0, took - self._estimates.seconds(pull.arm, pull.batch, pull.cached)))
        self._left += pull.charged - lost
        self.spent += lost

    def decide(self, batch: int, cached: int) -> None:
        """What the bucket of this batch size does next."""
        bucket = self._buckets.index(batch)
        rates = self._estimates.rates(self._buckets.all[bucket].arms, batch, cached)
        best, active = _best(rates), self._active[bucket]
        if rates[best] > (1 + MARGIN) * rates[active]:
            self._active[bucket] = active = best
        if self._exploring is None and len(rates) > 1:
            self._explore(bucket, rates, batch, cached)

    def weights_changed(self) -> None:
        """Another target or drafter: explores with what was laid by for that."""
        self._left += self._reserve
        self._reserve, self._new_weights = 0.0, True

    def _explore(self, bucket: int, rates: dict[Choice, float], batch: int, cached: int) -> None:
        active, step, pulled = self._active[bucket], self._steps[bucket], self._pulled[bucket]
        best = rates[active]
        worth = {arm: rate / best + BONUS * sqrt(step - pulled[arm]) for arm, rate in rates.items() if arm != active}
        arm = _best(worth)
        if worth[arm] <= 1 + WORTH * (1 - 1 / batch):
            return
        # beside off a step begins with reading, or the next one does: of two, one tells what it takes. Of new weights
        # it is in question what is accepted, of which one tells
        steps = 2 if arm is None or (active is None and not self._new_weights) else 1
        lost = steps * self._lost(arm, batch, cached, self._estimates.seconds(arm, batch, cached))
        lost += self._estimates.reading(batch * steps)
        if self._left >= min(lost, self._share * SAVED_S) > 0:
            self._exploring, self._steps_left = (bucket, arm), steps

    def _lost(self, arm: Choice, batch: int, cached: int, seconds: float) -> float:
        """Of a step's seconds, those in which the active arm would not have made its tokens."""
        active = self._active[self._buckets.index(batch)]
        best = self._estimates.rates((active,), batch, cached)[active]
        return max(LEAST * seconds, seconds - batch * self._estimates.acceptance.lengths[arm] / best)


def _best(worth: dict[Choice, float]) -> Choice:
    """The first of equals."""
    return max(worth, key=worth.__getitem__)
