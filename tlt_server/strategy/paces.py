"""How long steps take against what timing said: the half of a reward that is of the machine, learned in each bucket.

What is measured is the logarithm of a step's seconds over those expected of its arm. Two things move it:

**The level** moves all arms of the bucket alike: requests grow long, and timing knew short ones alone; others use the
machine. Were that taken for the doing of the arm that happens to run, a good arm would be left in hard times, and an
idle one would be judged by how easy it had it. So it was once: of the time of 64 requests of 512 tokens on an H200,
0.35 went to chain 5,1,6, where 3,1,4 is faster by 4 % (at 79e2d28); since then 0.10 (benchmarks/results/
strategy.h200.json). Each batch began short, and 3,1,4 had last been seen where the one before was long.

**An arm's pace**, beside the others, which stays what it is.

Both are parts of a Kalman filter, as in acceptance.py; its covariances are left out, for steps of one arm in a row are
most of what comes, and tell of the level. So the arm in force tells the level, and a look tells its arm's pace beside
it, however long ago others were seen.

A step may have waited for something else: an error counts as `_CLIP` standard deviations at most. Several such in a row
are no outliers. Where the arm has decoded for longer than a look lasts and others may have come to the machine, the
level has moved; otherwise, or where it is more than others could do, the arm has changed.
"""

from collections.abc import Iterable
from math import exp, log, sqrt

from tlt_server.strategy.arms import Choice

LONGEST_LOOK = 5
"""Steps in a row with an arm that is not in force, at most (bandit.py)."""
FAR = 1.5
"""So many times as long as expected, or as short, is no doing of others': the arm has changed."""
_SCATTER = 0.03**2
"""Variance of one step's logarithm; on H200s its root is 0.005 to 0.04, by step logs that are not kept."""
_LEVEL_DRIFT, _PACE_DRIFT = 0.01**2, 0.001**2
"""Variance that a step of the bucket adds: the level is of the last few, a pace of the last thousand."""
_UNKNOWN, _UNKNOWN_LEVEL, _MOST = 0.1**2, 0.03**2, 0.05**2
"""Variance of a pace and of the level before anything was measured; and what that of a pace drifts to at most, or is
after a restart, for arms are timed anew then. Timing knows the GPU's part of a step alone: on H200s steps take a fifth
longer. At the start that is taken for the pace of the arm that shows it, rather than for the level. So arms that were
never pulled seem too good, and are soon tried."""
_CLIP, _IN_A_ROW = 2.5, 3


class Paces:
    """Of all arms in one bucket.

    arms: those that were timed.
    """

    def __init__(self, arms: Iterable[Choice]) -> None:
        self._level, self._level_variance, self._steps = 0.0, _UNKNOWN_LEVEL, 0
        self._arms = {arm: _Pace() for arm in arms}
        self._newest: Choice = None
        self._in_a_row = 0
        self._settled: Choice = None  # the arm that has decoded for longer than a look
        self._factor = 1.0

    def observe(self, arm: Choice, ratio: float) -> None:
        """A step took so many times as long as was expected of its arm."""
        self._steps += 1
        self._in_a_row = self._in_a_row + 1 if arm == self._newest else 1
        self._newest = arm
        if self._in_a_row > LONGEST_LOOK:
            self._settled = arm
        pace = self._arms[arm]
        pace.age(self._steps)
        self._level_variance += _LEVEL_DRIFT
        error = self._clipped(arm, pace, log(ratio) - self._level - pace.mean)
        total = self._level_variance + pace.variance + _SCATTER
        gain = self._level_variance / total
        self._level += gain * error
        self._level_variance *= 1 - gain
        self._factor = exp(self._level)
        pace.learn(error, pace.variance / total)

    def factor(self, arm: Choice) -> float:
        """How many times as long as timing said a step of this arm takes now."""
        return self._factor * self._arms[arm].factor

    def known(self) -> dict[Choice, float]:
        """The logarithm of that, of every arm that was measured or restored."""
        return {arm: self._level + pace.mean for arm, pace in self._arms.items() if pace.variance < _UNKNOWN}

    def restore(self, arm: Choice, mean: float) -> None:
        """Takes over what was known of an arm, here or on a server like this one, which timed it anew."""
        self._arms[arm] = _Pace(mean, _MOST)

    def _clipped(self, arm: Choice, pace: "_Pace", error: float) -> float:
        most = _CLIP * sqrt(self._level_variance + pace.variance + _SCATTER)
        if abs(error) <= most:
            pace.far.clear()
            return error
        if pace.far and pace.far[-1] * error < 0:
            pace.far.clear()
        pace.far.append(error)
        if len(pace.far) < _IN_A_ROW:
            return most if error > 0 else -most
        error = min(pace.far, key=abs)
        pace.far.clear()
        if arm == self._settled and abs(error) < log(FAR):
            self._level_variance = error * error
        else:
            pace.variance = error * error
        return error


class _Pace:
    """Of an arm, in logarithms; far: errors in a row that were too great, to one side."""

    def __init__(self, mean: float = 0.0, variance: float = _UNKNOWN) -> None:
        self.mean, self.variance, self.factor = mean, variance, exp(mean)
        self.far: list[float] = []
        self._step = 0

    def age(self, step: int) -> None:
        """So many steps of the bucket have been."""
        if self.variance < _MOST:
            self.variance = min(self.variance + _PACE_DRIFT * (step - self._step), _MOST)
        self._step = step

    def learn(self, error: float, gain: float) -> None:
        self.mean += gain * error
        self.variance *= 1 - gain
        self.factor = exp(self.mean)
