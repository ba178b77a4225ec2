"""Is as much accepted of the drafts as is demanded? A sequential test by betting, on counts of live requests.

What is observed is a *stretch*: the share of its drafts that one request had accepted in `STRETCH` verify passes in a
row. A trial holds a level against the stretches, in the order in which they are completed, by two bets:

    that it is worse    wealth *= 1 + bet * (level - share),    0 <= bet < 1 / (1 - level)
    that it is not      wealth *= 1 + bet * (share - level),    0 <= bet < 1 / level

Where the expected share of each stretch, whatever came before, is at least the level, the first wealth is a nonnegative
supermartingale that begins at 1, so it ever reaches 1 / `ALARM_RATE` with probability at most `ALARM_RATE`, however
long one looks; the second likewise where it is at most the level (Ville 1939; Waudby-Smith and Ramdas,
arXiv 2010.09686, section 4). Nothing else is assumed of how the shares are distributed.

Stretches of one request are alike: some text is hard to draft, for as long as the request runs. The expected share of
its next stretch is then below the level, though the drafter is as good as ever. So the bet on the n-th stretch of a
request is 1 / sqrt(n) of that on its first, and the standard error of a baseline counts requests, not stretches. That
keeps false alarms rare, it does not bound them: tests/engine/weights/test_watchdog.py tries it on recorded traffic.

Pure: without a clock, and by + - * / and sqrt of 64-bit floats alone, which IEEE 754 rounds alike everywhere. So ranks
that are fed the same counts come to the same verdict at the same step.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

STRETCH = 8
"""Verify passes. Shorter: surer of a collapse after fewer passes; longer: fewer sums to keep."""
LEAST, LEAST_REQUESTS = 64, 4
"""Stretches, and the requests they must be of, that a baseline needs."""
PATIENCE = 4096
"""Stretches after which a trial without a verdict ends: plainly worse it is not."""
ALARM_RATE = 1e-3
"""Bound on the probability that a drafter at the level, or above it, is called worse in one trial."""
PASS_RATE = 1e-2
"""Bound on the probability that one at the level, or below it, is called as good before `PATIENCE` is over."""
BETS = (0.1, 0.25, 0.5, 0.9)
"""Shares of the largest bet; the wealth is the average over them, since nobody knows beforehand which one pays."""
ERRORS = 3.0
"""Standard errors that a baseline's mean is lowered by, so that chance in it demands too much once in 700 times."""


class Stretch(NamedTuple):
    """`share`, in [0, 1], of the drafts that `request` could have had accepted."""

    request: str
    share: float


class Verdict(Enum):
    WORSE = "worse"
    AS_GOOD = "as good"


class Stretches:
    """Cuts the counts of each request into stretches. `most`: drafts that one pass can accept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, tuple[int, int]] = {}

    def add(self, accepted: Sequence[tuple[str, int]]) -> list[Stretch]:
        """Takes in a step: accepted drafts by request. Returns the stretches that it completes.

        What a request began and does not go on with in the next step is forgotten.
        """
        still, complete = {}, []
        for request, count in accepted:
            passes, total = self._open.get(request, (0, 0))
            passes, total = passes + 1, total + count
            if passes == STRETCH:
                complete.append(Stretch(request, total / (STRETCH * self._most)))
                passes = total = 0
            still[request] = passes, total
        self._open = still
        return complete


def mean_of(found: Sequence[Stretch]) -> float:
    return math.fsum(each.share for each in found) / len(found)


def lower_bound(found: Sequence[Stretch]) -> float | None:
    """What the mean share is sure to be at least; None where there is too little to say.

    The standard error is the larger of two: as if all stretches were independent, and as if only requests were.
    """
    requests: dict[str, float] = defaultdict(float)
    if len(found) < LEAST:
        return None
    mean = mean_of(found)
    for request, share in found:
        requests[request] += share - mean
    if len(requests) < LEAST_REQUESTS:
        return None
    by_request = math.fsum(each**2 for each in requests.values()) * len(requests) / (len(requests) - 1)
    by_stretch = math.fsum((each.share - mean) ** 2 for each in found)
    return mean - ERRORS * math.sqrt(max(by_request, by_stretch)) / len(found)


class Trial:
    """Holds `level`, within (0, 1), against what is accepted."""

    def __init__(self, level: float) -> None:
        self.level = level
        self.found: list[Stretch] = []
        self._of_request: Counter[str] = Counter()
        self._worse = [1.0] * len(BETS)
        self._as_good = [1.0] * len(BETS)

    def add(self, stretch: Stretch) -> Verdict | None:
        """Takes in one stretch; the trial is over with a verdict."""
        self.found.append(stretch)
        self._of_request[stretch.request] += 1
        short = (self.level - stretch.share) / math.sqrt(self._of_request[stretch.request])
        self._worse = _bet(self._worse, short / (1 - self.level))
        self._as_good = _bet(self._as_good, -short / self.level)
        if _average(self._worse) >= 1 / ALARM_RATE:
            return Verdict.WORSE
        enough = len(self.found) >= LEAST and len(self._of_request) >= LEAST_REQUESTS  # for a baseline of its own
        if (enough and _average(self._as_good) >= 1 / PASS_RATE) or len(self.found) >= PATIENCE:
            return Verdict.AS_GOOD
        return None


def _bet(wealth: list[float], gain: float) -> list[float]:
    """`gain`: of the largest bet, at least -1."""
    return [each * (1 + share * gain) for each, share in zip(wealth, BETS, strict=True)]


def _average(wealth: list[float]) -> float:
    return math.fsum(wealth) / len(wealth)
