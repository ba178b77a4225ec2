"""How many drafts are accepted, by arm: the half of a reward that depends on what is said, and not on the machine.

It depends on target, drafter and text, hardly on the batch size. So it is learned once for all buckets, in three parts:

**The curve** of chains (curve.py) says how a deep one compares with a shallow one.

**The level** of now moves all arms alike. Text is easy to draft for, or hard, for dozens of steps together, and a new
drafter is better or worse. Were that taken for the doing of the arm that happens to run, a good arm would be left in
hard times, and an idle one would be judged by how easy it had it. The curve gives the shape alone: where it moves what
a chain is expected to have accepted, the level takes that back.

**A tree's lead** over a chain of its depth, which stays what it is when the level moves.

The three are sums of log-odds, of the share of its depth that an arm has accepted: so the level may move far, and no
draft is accepted beyond its end. A lead is steady on this scale: tree 5,4,16 has 0.9 over the chain of depth 5 where
that accepts 3.3 drafts of 5 (benchmarks/results/speedup.h200.json), and 0.7 for another model (lossless.h200.json),
where it accepts 1.7.

Level and leads are the parts of a Kalman filter (filter.py). Each result moves what it bears on, in proportion to how
little is known of it: the arm in force moves the level, an explored tree its lead, and an explored chain shows whether
the tree in force has a great lead or a high level. A new drafter or target makes the level uncertain, the leads hardly:
what the arm in force then learns, idle arms know at once.

All are means, not the paper's medians: tokens add up. At batch 1, where a reward takes few values and they are skewed,
the arm of the higher median is often not the one that makes more tokens.
"""

from collections.abc import Iterable
from math import exp, log, sqrt

from tlt_server.config import Arm
from tlt_server.strategy.arms import Choice, is_chain
from tlt_server.strategy.curve import Accepted, Curve
from tlt_server.strategy.filter import Filter
from tlt_server.strategy.learned import LearnedAcceptance, LearnedPart

TREE_LEAD = 1.0
"""Of a tree that was never pulled: measured 0.3 (5,4,8) to 0.9 (8,4,32). High rather than low: a tree that is thought
too good corrects that itself by being pulled; one that is thought too bad must wait for the budget."""
_CURVE_KEEP = 0.5 ** (1 / 300)
"""A sample counts half after 300 steps. The curve may be slow, for the level is quick."""
_LEVEL_VARIANCE, _LEAD_VARIANCE = 1.0, 0.1
"""Of what is not known yet."""
_TEXT_DRIFT, _DRAFTER_DRIFT, _LEAD_DRIFT = 2e-3, 2e-4, 1e-4
"""Variance that a step adds: to the level for each request's text, so that at batch 1 the level is of the last forty
steps or so, while many requests are not hard all at once; to the level at any batch; to each lead."""
_LEVEL_SWAP, _LEAD_SWAP = 1.0, 0.03
"""Variance that other weights add."""
_SURPRISE_GAIN, _SURPRISING = 0.2, 3.0
"""Part of the newest result in the mean of squared errors over their expectation, which is about 1 while nothing
changes; and the mean at which something has."""
_MOST_ERROR = 2.0
"""Log-odds that one result may be off by: it is no straight line that far out."""

_LONGEST, _SHORTEST = exp(4), exp(-4)
"""Odds of shares that are as good as 1 and 0, 0.982 and 0.018: beyond, a change would be noticed too late."""


class Acceptance:
    """Accept length of every arm.

    arms: all that may ever be asked for.
    """

    def __init__(self, arms: Iterable[Arm]) -> None:
        arms = set(arms)
        trees = sorted((arm for arm in arms if not is_chain(arm)), key=str)
        self._part = {tree: part for part, tree in enumerate(trees, start=1)}
        self._curve = Curve(max((arm.num_steps for arm in arms), default=1), _CURVE_KEEP)
        self._depths = sorted({arm.num_steps for arm in arms if is_chain(arm)})
        self._chains: dict[int, float] = {}
        most = [_LEVEL_VARIANCE] + [_LEAD_VARIANCE] * len(trees)
        self._filter = Filter([0.0] + [TREE_LEAD] * len(trees), most, most)
        self._surprise = 1.0

    def observe(self, arm: Choice, batch: int, accepted: Accepted) -> None:
        """One settled decode step.

        Args:
            arm: it was launched with.
            batch: requests in it.
            accepted: of those that count, at least one.
        """
        if arm is not None:
            self._learn(arm, accepted)
            if is_chain(arm):
                before = _between(self._curve.odds(arm.num_steps))
                self._curve.observe(accepted, arm.num_steps)
                self._filter.mean[0] -= log(_between(self._curve.odds(arm.num_steps)) / before)
            self._chains.clear()
        self._filter.drift(_TEXT_DRIFT / batch + _DRAFTER_DRIFT, _LEAD_DRIFT)

    def length(self, arm: Choice) -> float:
        """Tokens that one verify is expected to give a request, the bonus token included; 1 for off."""
        if arm is None:
            return 1.0
        if not is_chain(arm):
            return 1.0 + arm.num_steps * self._share(arm)
        if not self._chains:  # asked for every arm in every step, and changed by a result alone
            self._chains = self._lengths()
        return self._chains[arm.num_steps]

    def doubt(self, arm: Choice) -> float:
        """How uncertain an arm's place among the others is: the standard deviation of its drafts' relative error.

        The level does not count, which moves all alike.
        """
        if arm is None or is_chain(arm):
            return 0.0
        part = self._part[arm]
        return sqrt(self._filter.covariance[part][part]) * (1 - self._share(arm))

    def weights_changed(self) -> None:
        """Another target or drafter is in force: what was accepted before says less."""
        self._surprise = 1.0
        self._curve.forget()
        self._filter.drift(_LEVEL_SWAP, _LEAD_SWAP)

    def learned(self) -> LearnedAcceptance:
        """All of it, to be restored; of the covariances the diagonal."""
        parts = [
            LearnedPart(arm, self._filter.mean[part], self._filter.covariance[part][part])
            for arm, part in [(None, 0), *self._part.items()]
        ]
        return LearnedAcceptance(tuple(self._curve.trials), tuple(self._curve.hits), tuple(parts))

    def restore(self, learned: LearnedAcceptance) -> None:
        """Takes over what was learned, of the arms that there are."""
        self._curve.restore(learned.trials, learned.hits)
        mean, most = self._filter.mean, self._filter.most
        variance = [row[part] for part, row in enumerate(self._filter.covariance)]
        for each in learned.parts:
            if (part := 0 if each.arm is None else self._part.get(each.arm)) is not None:
                mean[part], variance[part] = each.mean, each.variance
        self._filter = Filter(mean, variance, most)
        self._chains.clear()

    def _learn(self, arm: Arm, accepted: Accepted) -> None:
        """Level and lead from what an arm had accepted; from too great an error, that something has changed."""
        share = self._share(arm)
        error = (accepted.drafts / accepted.requests / arm.num_steps - share) / (share * (1 - share))
        # a geometric law has a variance of mean + mean², of which the draft's end cuts off as much as is accepted
        noise = (1 + 1 / (share * arm.num_steps)) / (1 - share) / accepted.requests
        parts = (0,) if is_chain(arm) else (0, self._part[arm])
        surprise = self._filter.learn(parts, max(-_MOST_ERROR, min(_MOST_ERROR, error)), noise)
        self._surprise += _SURPRISE_GAIN * (min(surprise, 10.0) - self._surprise)
        if self._surprise > _SURPRISING:
            self.weights_changed()

    def _lengths(self) -> dict[int, float]:
        """Of chains, by depth.

        A chain accepts what each shallower one would have: what the level adds in log-odds must not turn that round.
        """
        most, level, found = 0.0, exp(self._filter.mean[0]), {}
        for depth in self._depths:
            most = max(most, depth * self._moved(depth, level))
            found[depth] = 1.0 + most
        return found

    def _share(self, arm: Arm) -> float:
        """Of its depth, what an arm is expected to have accepted; between 0 and 1, neither included."""
        lead = 0.0 if is_chain(arm) else self._filter.mean[self._part[arm]]
        return self._moved(arm.num_steps, exp(self._filter.mean[0] + lead))

    def _moved(self, depth: int, factor: float) -> float:
        """The curve's share of a depth, its odds times a factor."""
        odds = _between(_between(self._curve.odds(depth)) * factor)
        return odds / (1 + odds)


def _between(odds: float) -> float:
    return _LONGEST if odds > _LONGEST else _SHORTEST if odds < _SHORTEST else odds
