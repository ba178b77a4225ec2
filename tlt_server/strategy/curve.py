"""Acceptance of chains by position: one verify tells what every shallower chain would have accepted.

A chain of depth 7 begins as one of depth 3 does. What neither tells is how a draft that was accepted whole would have
gone on. That is a survival curve under censoring, and its estimator is Kaplan and Meier's (1958): at each position, the
share accepted of those that got so far. A position that no chain has reached is taken to go on like the one before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

_FIRST_RATE = 0.7
"""Acceptance of a first draft before anything was verified; a drafter that is worth serving has 0.6 to 0.95."""
_PRIOR_TRIALS = 4.0
"""Trials that this, or for a position what the one before it says, is worth."""
_REMEMBERED = 8.0
"""Trials that a position keeps, however old: its last mean is a better guess than none, though a few new ones move it.
Were they forgotten, deep chains would be tried again and again outside the budget of exploration."""


class Accepted(NamedTuple):
    """What the requests of a decode step had accepted, counted once for all who ask.

    requests: that count.
    drafts: of all of them.
    ends: requests that had no draft accepted, one, and so on, up to the most.
    """

    requests: int
    drafts: int
    ends: Sequence[int]

    @classmethod
    def of(cls, drafts: Sequence[int]) -> "Accepted":
        """Of the accepted drafts of each request, the bonus token left out.

        Raises:
            ValueError: more than 255 of a request, which no draft has.
        """
        each = bytes(drafts)  # counted several times as fast as integers
        ends: list[int] = []
        left = len(each)
        while left:
            ends.append(each.count(len(ends)))
            left -= ends[-1]
        return cls(len(each), sum(drafts), ends)

    @property
    def most(self) -> int:
        """Drafts that one request had accepted."""
        return max(0, len(self.ends) - 1)


class Curve:
    """Kaplan and Meier's estimator, with a memory that fades.

    trials[k]: drafts at position k that were verified with all before them accepted, discounted by age.
    hits[k]: those of them that were accepted.
    """

    def __init__(self, depth: int, keep: float) -> None:
        """`keep`: what each observation leaves of those before it, down to a remembered few."""
        self.trials = [0.0] * depth
        self.hits = [0.0] * depth
        self._keep = keep
        self._refresh()

    def observe(self, accepted: Accepted, steps: int) -> None:
        """One verified batch of a chain of so many steps."""
        keep, reached, ends = self._keep, accepted.requests, accepted.ends
        for k, old in enumerate(self.trials):
            if old > _REMEMBERED:
                less = keep if keep * old > _REMEMBERED else _REMEMBERED / old
                self.trials[k] *= less
                self.hits[k] *= less
            if k < steps:
                self.trials[k] += reached
                reached -= ends[k] if k < len(ends) else 0
                self.hits[k] += reached
        self._refresh()

    def forget(self) -> None:
        """All but a remembered few of what was observed counts no more. It shows with the next observation."""
        for k, trials in enumerate(self.trials):
            if trials > _REMEMBERED:
                self.trials[k], self.hits[k] = _REMEMBERED, self.hits[k] * _REMEMBERED / trials

    def restore(self, trials: Sequence[float], hits: Sequence[float]) -> None:
        """Takes over what another curve knew, as far as this one reaches."""
        depth = min(len(self.trials), len(trials))
        self.trials[:depth], self.hits[:depth] = trials[:depth], hits[:depth]
        self._refresh()

    def odds(self, steps: int) -> float:
        """Drafts of a chain of this depth expected to be accepted, over those expected not to be; at most 1000."""
        drafts = self._drafts[steps - 1]
        return drafts / (steps - drafts) if drafts < 0.999 * steps else 1000.0

    def _refresh(self) -> None:
        """Expects so many drafts of a chain to be accepted, by depth."""
        rate, survival, total = _FIRST_RATE, 1.0, 0.0
        self._drafts = []
        for trials, hits in zip(self.trials, self.hits, strict=True):
            rate = (hits + _PRIOR_TRIALS * rate) / (trials + _PRIOR_TRIALS)
            survival *= rate
            total += survival
            self._drafts.append(total)
