"""How many drafts each arm has accepted: of the drafter and the text, hardly of the batch size, so one for all buckets.

An arm's share of its depth, in log-odds, is the sum of three parts. The *curve* of chains: by position, the share of
drafts accepted of those that got so far (Kaplan and Meier, 1958), so that one chain tells of all. The *level* of now,
which moves all arms alike. And a tree's *lead* over the chain of its depth. Level and leads are a Kalman filter's.
"""

from collections.abc import Iterable, Sequence
from math import exp, log

from tlt_server.config import Arm
from tlt_server.strategy.arms import Choice, is_chain

TREE_LEAD = 1.0
"""Of a tree that was never pulled. Measured are 0.3 to 0.9: one thought too good corrects itself by being pulled."""
_FIRST_RATE, _PRIOR_TRIALS = 0.7, 4.0
"""Acceptance of a first draft before anything was verified, and the trials that it is worth."""
_KEEP, _REMEMBERED = 0.5 ** (1 / 300), 8.0
"""A trial counts half after 300 steps; so many are kept however old, or deep chains would be tried again and again."""
_TEXT_DRIFT, _DRAFTER_DRIFT, _LEAD_DRIFT = 2e-3, 2e-4, 1e-4
"""Variance that a step adds: to the level for each request's text, to it at any batch, to each lead."""
_LEVEL_SWAP, _LEAD_SWAP, _MOST_LEAD = 1.0, 0.03, 0.1
"""Variance that other weights add, to the level all that it can have; and the most of a lead."""
_SURPRISE_GAIN, _SURPRISING = 0.2, 3.0
"""Of the newest squared error over its expectation in their mean; the mean at which something has changed."""
_MOST_ERROR, _MOST_ODDS = 2.0, exp(4)
"""Log-odds that one result may be off by, and odds as good as certain: the line is not straight so far out."""


class Filter:
    """A part that all share, at 0, and one of each, of whose sums observations tell (Kalman, 1960).

    mean: of each part. covariance: of each two. most: variance that a part's drifts to.
    """

    def __init__(self, mean: Sequence[float], variance: Sequence[float], most: Sequence[float]) -> None:
        self.mean, self.most = list(mean), most
        self.covariance = [[v if i == j else 0.0 for j in range(len(mean))] for i, v in enumerate(variance)]

    def learn(self, part: int, error: float, noise: float) -> float:
        """The sum of what is shared and a part was off by so much; 0: the former alone.

        noise: variance of the observation. Returns the error squared, over its expectation.
        """
        shared = self.covariance[0].copy()
        if part:
            shared = [ours + theirs for ours, theirs in zip(shared, self.covariance[part], strict=True)]
        total = noise + shared[0] + (shared[part] if part else 0.0)
        for i, row in enumerate(self.covariance):
            gain = shared[i] / total
            self.mean[i] += gain * error
            for j, theirs in enumerate(shared):  # a comprehension takes three times as long in so small a matrix
                row[j] -= gain * theirs
        return error * error / total

    def drift(self, first: float, others: float) -> None:
        """Time, or an event, adds so much variance to what is shared, and to each other part."""
        for i, most in enumerate(self.most):
            known = self.covariance[i][i]
            if known < most:
                self.covariance[i][i] = min(known + (others if i else first), most)


class Acceptance:
    """Accept length of every arm, in `lengths`: tokens that a verify gives a request, the bonus token included."""

    def __init__(self, arms: Iterable[Arm]) -> None:
        self.arms = sorted(arms, key=lambda arm: arm.num_steps)
        self.trials = [0.0] * max((arm.num_steps for arm in self.arms), default=1)
        self.hits = self.trials.copy()
        trees = [arm for arm in self.arms if not is_chain(arm)]
        self.part = {arm: trees.index(arm) + 1 if arm in trees else 0 for arm in self.arms}
        variance = [_LEVEL_SWAP, *(_MOST_LEAD for _ in trees)]
        self.filter = Filter([0.0, *(TREE_LEAD for _ in trees)], variance, variance)
        self._surprise = 1.0
        self.refresh()

    def observe(self, arm: Choice, accepted: Sequence[int]) -> None:
        """One settled step: accepted drafts of each request that counts, at least one."""
        if arm is not None:
            share = (self.lengths[arm] - 1) / arm.num_steps
            error = (sum(accepted) / len(accepted) / arm.num_steps - share) / (share * (1 - share))
            # a geometric law has a variance of mean + mean², of which the draft's end cuts off as much as is accepted
            noise = (1 + 1 / (share * arm.num_steps)) / (1 - share) / len(accepted)
            surprise = self.filter.learn(self.part[arm], max(-_MOST_ERROR, min(_MOST_ERROR, error)), noise)
            self._surprise += _SURPRISE_GAIN * (min(surprise, 10.0) - self._surprise)
            if self._surprise > _SURPRISING:
                self.weights_changed()
            if is_chain(arm):
                before = self._odds[arm.num_steps - 1]
                self._count(arm.num_steps, bytes(accepted))
                self.filter.mean[0] -= log(self._odds[arm.num_steps - 1] / before)  # the curve gives the shape alone
            self.refresh()
        self.filter.drift(_TEXT_DRIFT / len(accepted) + _DRAFTER_DRIFT, _LEAD_DRIFT)

    def weights_changed(self) -> None:
        """Another target or drafter: what was accepted before says less."""
        self._surprise = 1.0
        for k, trials in enumerate(self.trials):
            if trials > _REMEMBERED:
                self.trials[k], self.hits[k] = _REMEMBERED, self.hits[k] * _REMEMBERED / trials
        self.filter.drift(_LEVEL_SWAP, _LEAD_SWAP)

    def refresh(self) -> None:
        """Lengths anew, from the parts. A chain accepts what each shallower one would have."""
        rate, survival, total, self._odds = _FIRST_RATE, 1.0, 0.0, []
        for depth, (trials, hits) in enumerate(zip(self.trials, self.hits, strict=True), start=1):
            rate = (hits + _PRIOR_TRIALS * rate) / (trials + _PRIOR_TRIALS)
            survival *= rate
            total += survival
            self._odds.append(_bounded(total / max(depth - total, 1e-9)))
        self.lengths: dict[Choice, float] = {None: 1.0}
        most = 0.0
        for arm in self.arms:
            lead = self.filter.mean[self.part[arm]] if self.part[arm] else 0.0
            odds = _bounded(self._odds[arm.num_steps - 1] * exp(self.filter.mean[0] + lead))
            drafts = arm.num_steps * odds / (1 + odds)
            if is_chain(arm):
                drafts = most = max(most, drafts)
            self.lengths[arm] = 1 + drafts

    def _count(self, steps: int, each: bytes) -> None:
        reached = len(each)
        for k, old in enumerate(self.trials):
            if old > _REMEMBERED:
                keep = max(_KEEP, _REMEMBERED / old)
                self.trials[k], self.hits[k] = keep * old, keep * self.hits[k]
            if k < steps:
                self.trials[k] += reached
                reached -= each.count(k)
                self.hits[k] += reached
        self.refresh()


def _bounded(odds: float) -> float:
    return max(1 / _MOST_ODDS, min(_MOST_ODDS, odds))
