"""How many drafts are expected to be accepted: the log-odds of each, once those before it were.

A sum of the level of all drafts, which text and drafter move; of the draft's depth, for who is drafted for deep is easy
to draft for; and of a tree's lead over chains. So a chain tells of all others, as deep as it goes. Of each depth trials
are counted and successes: a draft that ended with its chain says nothing of deeper ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import exp

from tlt_server.config import Arm
from tlt_server.strategy.arms import is_chain
from tlt_server.strategy.filter import Sums

DEPTHS = 1, 3, 7
"""Depths up to these are much alike, and those beyond the last."""
TREE_LEAD = 0.7
"""Of a tree that was never pulled. Measured are 0.4 to 1."""
_FIRST, _MOST = 0.85, 5.0
"""Log-odds of a draft before anything was verified, 0.7; and as good as certain: farther out, results say nothing."""
_LEVEL, _OWN = 1.0, 0.1
"""Variance of the level, and of a depth's or a lead's own, before anything was seen, and the most by drift."""
_TEXT_DRIFT, _DRAFTER_DRIFT, _OWN_DRIFT, _OWN_SWAP = 2e-3, 2e-4, 1e-5, 0.03
"""Variance that a step adds to the level, for each request's text and at any batch, and to the others; and that other
weights add to these, for of the level all is in question then."""
_SURPRISE_GAIN, _SURPRISING = 0.25, 3.0
"""Of the newest squared error over its mean in their average; the average at which something has changed."""


class Acceptance:
    """Of drafters' arms."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        trees = [arm for arm in arms if not is_chain(arm)]
        groups = len(DEPTHS) + 1
        variance = [_LEVEL, *[_OWN] * (groups + len(trees))]
        self._odds = Sums([_FIRST, *[0.0] * groups, *[TREE_LEAD] * len(trees)], variance, variance)
        self._leads = {tree: part for part, tree in enumerate(trees, start=1 + groups)}
        # by arm: of each group of its depths what lies before the first, the last, and the odds' parts
        self._groups: dict[Arm, list[tuple[int, int, tuple[int, ...]]]] = {}
        for arm in arms:
            lead = (self._leads[arm],) if arm in self._leads else ()
            ends = pairwise([0, *(depth for depth in DEPTHS if depth < arm.num_steps), arm.num_steps])
            self._groups[arm] = [
                (before, last, (0, group, *lead)) for group, (before, last) in enumerate(ends, start=1)
            ]
        self._lengths: dict[Arm, float] = {}  # known since something was learned
        self._surprise = 1.0

    def length(self, arm: Arm) -> float:
        """Accept length: tokens that a verify gives a request, the bonus token included."""
        if arm not in self._lengths:
            tokens = reached = 1.0
            for before, last, parts in self._groups[arm]:
                rate, kept = _rate(self._odds.of(parts)), reached
                reached *= rate ** (last - before)
                tokens += rate * (kept - reached) / (1 - rate)
            self._lengths[arm] = tokens
        return self._lengths[arm]

    def drift(self, steps: int, results: int) -> None:
        """Time goes by, in which so many steps gave so many requests' results."""
        level = steps * (_TEXT_DRIFT * steps / results + _DRAFTER_DRIFT)
        self._odds.drift(level, steps * _OWN_DRIFT)

    def learn(self, arm: Arm, accepted: Sequence[int]) -> None:
        """Accepted drafts of requests, in steps with an arm."""
        self._lengths = {}
        ended = Counter(accepted)
        reached = [*accumulate(ended[depth] for depth in range(arm.num_steps, -1, -1))][::-1]  # each depth, or deeper
        errors = []
        for before, last, parts in self._groups[arm]:
            tried, taken = sum(reached[before:last]), sum(reached[before + 1 : last + 1])
            if not tried:
                break
            odds = self._odds.of(parts)
            rate = _rate(odds)
            off = taken - tried * rate
            if abs(odds) < _MOST or off * odds < 0:
                told = tried * rate * (1 - rate)  # Fisher's information
                errors.append(min(self._odds.learn(parts, off / told, 1 / told), 10.0))
        if errors:
            self._surprise += _SURPRISE_GAIN * (sum(errors) / len(errors) - self._surprise)
            if self._surprise > _SURPRISING:  # text has changed, most likely, which moves the level
                self._changed(0.0)

    def weights_changed(self) -> None:
        """Another target or drafter: the level may be anything, and depths and trees differ otherwise by a little."""
        self._changed(_OWN_SWAP)

    def learned(self) -> tuple[float, tuple[float, ...], dict[Arm, float]]:
        """The level, what each depth has beside it, and the leads of trees."""
        level, *depths = self._odds.mean[: 2 + len(DEPTHS)]
        return level, tuple(depths), {tree: self._odds.mean[part] for tree, part in self._leads.items()}

    def restore(self, level: float, depths: Sequence[float], leads: Mapping[Arm, float]) -> None:
        """Takes that over, of the trees that there still are."""
        self._lengths = {}
        self._odds.mean[: 1 + len(depths)] = [level, *depths]
        for tree, part in self._leads.items():
            self._odds.mean[part] = leads.get(tree, self._odds.mean[part])

    def _changed(self, own: float) -> None:
        self._odds.drift(_LEVEL, own)
        self._surprise = 1.0


def expected_length(arm: Arm, odds: float) -> float:
    """Accept length, where each draft is accepted with these log-odds once those before it were."""
    rate = _rate(odds)
    return 1 + rate * (1 - rate**arm.num_steps) / (1 - rate)


def _rate(odds: float) -> float:
    """Acceptance of a draft."""
    return 1 / (1 + exp(-max(-_MOST, min(_MOST, odds))))
