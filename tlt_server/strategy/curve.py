"""Acceptance of chains by position: one verify tells what every shallower chain would have accepted.

A chain of depth 7 begins as one of depth 3 does. What neither tells is how a draft that was accepted whole would have
gone on. That is a survival curve under censoring, and its estimator is Kaplan and Meier's (1958): at each position, the
share accepted of those that got so far. A position that no chain has reached is taken to go on like the one before it.
"""

from collections.abc import Sequence

_FIRST_RATE = 0.7
"""Acceptance of a first draft before anything was verified; a drafter that is worth serving has 0.6 to 0.95."""
_PRIOR_TRIALS = 4.0
"""Trials that this, or for a position what the one before it says, is worth."""
_REMEMBERED = 8.0
"""Trials that a position keeps, however old: its last mean is a better guess than none, though a few new ones move it.
Were they forgotten, deep chains would be tried again and again outside the budget of exploration."""


class Curve:
    """Kaplan and Meier's estimator, with a memory that fades.

    trials[k]: drafts at position k that were verified with all before them accepted, discounted by age.
    hits[k]: those of them that were accepted.
    """

    def __init__(self, depth: int) -> None:
        self.trials = [0.0] * depth
        self.hits = [0.0] * depth
        self._refresh()

    def observe(self, accepted: Sequence[int], steps: int) -> None:
        """One verified batch of a chain of so many steps: accepted drafts of each request."""
        ends = bytes(accepted) if steps < 256 else accepted  # bytes are counted several times as fast as integers
        reached = len(ends)
        for k in range(steps):
            self.trials[k] += reached
            reached -= ends.count(k)
            self.hits[k] += reached
        self._refresh()

    def age(self, keep: float) -> None:
        """Makes all that was observed count less, down to a remembered few. It shows with the next observation."""
        for k, trials in enumerate(self.trials):
            if trials > _REMEMBERED:
                less = keep if keep * trials > _REMEMBERED else _REMEMBERED / trials
                self.trials[k] *= less
                self.hits[k] *= less

    def restore(self, trials: Sequence[float], hits: Sequence[float]) -> None:
        """Takes over what another curve knew, as far as this one reaches."""
        depth = min(len(self.trials), len(trials))
        self.trials[:depth], self.hits[:depth] = trials[:depth], hits[:depth]
        self._refresh()

    def odds(self, steps: int) -> float:
        """Drafts of a chain of this depth expected to be accepted, over those expected not to be; at most 1000."""
        return self._odds[steps - 1]

    def _refresh(self) -> None:
        rate, survival, total = _FIRST_RATE, 1.0, 0.0
        self._odds = []
        for depth, (trials, hits) in enumerate(zip(self.trials, self.hits, strict=True), start=1):
            rate = (hits + _PRIOR_TRIALS * rate) / (trials + _PRIOR_TRIALS)
            survival *= rate
            total += survival
            self._odds.append(total / (depth - total) if total < 0.999 * depth else 1000.0)
