"""What each arm is expected to make: batch size * accept length / step seconds, whose halves are learned apart.

Each is a sum of what all arms share, their level, and of an arm's own. Of acceptance, in log-odds of a draft: text and
drafter move all arms, and trees differ from chains. Of step time, in logarithms of seconds over what timing said: long
requests, or others on the machine, move all. So the arm that runs tells the level, an exploration step its arm's own,
and whose a jump was.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import copysign, exp, inf, log, sqrt
from statistics import median_low
from typing import Annotated

import msgspec

from tlt_server.config import Arm
from tlt_server.strategy.arms import Choice, is_chain
from tlt_server.strategy.costs import StepCosts

TREE_LEAD = 1.0
"""Of a tree that was never pulled. Measured are 0.4 to 1: one thought too good corrects itself by being pulled."""
_FIRST_ODDS, _MOST_ODDS = 0.85, 5.0
"""Of a draft before anything was verified, 0.7; and as good as certain: farther out, results say nothing of odds."""
_TEXT_DRIFT, _DRAFTER_DRIFT, _LEAD_DRIFT, _LEAD_SWAP = 2e-3, 2e-4, 1e-4, 0.03
"""Variance that a step adds to the level of acceptance, for each request's text and at any batch, and to an arm's own;
and that other weights add to the latter, of the former all is in question."""
_ODDS, _TIMES = (1.0, 0.1), (0.03**2, 0.1**2)
"""Variance of the level, and of an arm's own, before anything was seen. Timing knows the GPU's part of a step alone:
taken for an arm's own at first, so that arms never pulled seem too good, and are tried."""
_COMMON_DRIFT, _OWN_DRIFT, _SCATTER = 0.01**2, 0.001**2, 0.03**2
"""Variance that a step adds to the level of times, so that it is of the last few, to an arm's own; and of one step."""
_CLIP, FAR = 3.5, 1.5
"""Standard deviations that a step's time counts for, unless the next ones say so too. Then it is the own of an arm that
was explored; of one that has decoded for longer it is anybody's, until a step of another arm tells. And times as long
as expected that are far."""
_WAITED = 24.0
"""Usual steps' time that an arm in force must lose by steps so far off before they are believed. What many requests
that begin at once do to a server's first steps is over by then; believed, it would be held against it for seconds."""
_RESTARTED = 0.05**2
"""Variance of an arm's own step time after a restart, on what may be another machine, and the most by drift."""
_SURPRISE_GAIN, _SURPRISING = 0.2, 3.0
"""Of the newest squared error over its mean in their average; the average at which something has changed."""
TOGETHER = 4
"""Results of one arm that are learned from at once: none of them matters alone."""
_READING_KEPT = 0.9
"""Of what reading took before, with each time that the drafter reads what it missed."""

Bounded = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class Learned(msgspec.Struct, frozen=True):
    """All that is worth keeping over a restart, as JSON can hold it.

    level: of acceptance, then of step time. arms: each with its own of both. reading: tokens, and their seconds.
    """

    level: tuple[Bounded, Bounded]
    arms: tuple[tuple[Choice, Bounded, Bounded], ...]
    reading: tuple[Annotated[float, msgspec.Meta(ge=0, le=1e9)], Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]]


class Sums:
    """A level that all arms share, at 0, and what each has beside it, of whose sums results tell (Kalman, 1960).

    own: of each arm, at first. variance: of the level and of an arm's own, at first. most: that these drift to.
    told: `mean` when the present arm began: what others have told.
    """

    def __init__(self, own: Mapping[Choice, float], variance: tuple[float, float], most: tuple[float, float]) -> None:
        self.part = {arm: part for part, arm in enumerate(own, start=1)}
        self.mean = [0.0, *own.values()]
        self.told = [*self.mean]
        self._most = [most[0]] + [most[1]] * len(own)
        first = [variance[0]] + [variance[1]] * len(own)
        self.covariance = [[v if i == j else 0.0 for j in range(len(first))] for i, v in enumerate(first)]

    def of(self, arm: Choice) -> float:
        """The sum."""
        return self.mean[0] + self.mean[self.part[arm]]

    def variance(self, arm: Choice) -> float:
        """Of the sum."""
        part, known = self.part[arm], self.covariance
        return known[0][0] + 2 * known[0][part] + known[part][part]

    def drift(self, level: float, own: float) -> None:
        """Time, or an event, adds so much variance to the level, and to each arm's own."""
        for i, most in enumerate(self._most):
            known = self.covariance[i][i]
            if known < most:
                self.covariance[i][i] = min(known + (own if i else level), most)

    def jump(self, arm: Choice, by: float, *, both: bool) -> None:
        """The sum of an arm is another by so much: its own, or as likely the level. Until another arm tells, the arm's
        own moves by half of the last jump at most: those of a noisy machine would add up.
        """
        part = self.part[arm]
        for i in (0, part) if both else (part,):
            self.covariance[i][i] += by * by
        if both:
            surplus = self.mean[part] + by / 2 - self.told[part]
            surplus -= max(-abs(by) / 2, min(abs(by) / 2, surplus))
            self.mean[part] -= surplus
            self.mean[0] += surplus

    def learn(self, arm: Choice, error: float, noise: float) -> float:
        """The sum of an arm was off by so much, with so much variance. Returns the error squared over its mean."""
        shared = [
            ours + theirs for ours, theirs in zip(self.covariance[0], self.covariance[self.part[arm]], strict=True)
        ]
        known = shared[0] + shared[self.part[arm]]
        total = known + noise
        move = max(-2.5, min(2.5, error * known / total)) / known  # farther out, the line is not straight
        for i, row in enumerate(self.covariance):
            gain = shared[i] / total
            self.mean[i] += shared[i] * move
            for j, theirs in enumerate(shared):  # a comprehension takes three times as long in so small a matrix
                row[j] -= gain * theirs
        return error * error / total


class Estimates:
    """Expected rewards of all arms. costs: of every arm, and of off.

    What a draft of history gives is foreseen for the present batch (`foresee`), not learned here: its results move no
    level that a drafter's arms have.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        drafters = [arm for arm in costs.arms if arm and not arm.of_history]
        self._odds = Sums({arm: _FIRST_ODDS + lead(arm) for arm in drafters}, _ODDS, _ODDS)
        self._foreseen: Sequence[float] = ()
        self._times = Sums(dict.fromkeys(costs.arms, 0.0), _TIMES, (inf, _RESTARTED))
        self._surprise = 1.0
        self._far: dict[Choice, list[float]] = defaultdict(list)
        self._newest: Choice = None
        self._in_a_row = 0  # of the newest arm
        self._steps = 0  # of them, not learned from yet
        self._accepted: list[int] = []
        self._took: list[float] = []
        self._reading = 0.0, 0.0

    def observe(self, arm: Choice, accepted: Sequence[int], expected: float, seconds: float | None) -> None:
        """A settled step, of so many seconds expected; None where they were not the arm's doing."""
        took = None if seconds is None else log(seconds / expected) + self._times.of(arm)
        if arm != self._newest or self._steps == TOGETHER:
            self.learn()
        if arm != self._newest:
            self._times.told = [*self._times.mean]
        self._in_a_row = self._in_a_row + 1 if arm == self._newest else 1
        self._newest = arm
        self._steps += 1
        self._accepted += accepted
        if took is not None:
            self._took.append(took)

    def learn(self) -> None:
        """From results that wait."""
        steps, accepted, took = self._steps, self._accepted, self._took
        self._steps, self._accepted, self._took = 0, [], []
        if steps:
            self._odds.drift(steps * (_TEXT_DRIFT * steps / len(accepted) + _DRAFTER_DRIFT), steps * _LEAD_DRIFT)
            if self._newest is not None and not self._newest.of_history:
                self._learn_odds(self._newest, accepted)
        if took:
            self._times.drift(len(took) * _COMMON_DRIFT, len(took) * _OWN_DRIFT)
            noise = _SCATTER / len(took)
            self._times.learn(self._newest, self._believed(took, noise), noise)

    def _learn_odds(self, arm: Arm, accepted: Sequence[int]) -> None:
        odds = self._odds.of(arm)
        rate, mean = _drafts(arm.num_steps, odds)
        slope = mean - arm.num_steps * rate ** (arm.num_steps + 1)  # of the mean, over the odds
        variance = 2 * slope / (1 - rate) - mean - mean * mean
        off = sum(accepted) / len(accepted) - mean
        if abs(odds) < _MOST_ODDS or off * odds < 0:
            surprise = self._odds.learn(arm, off / slope, variance / (slope * slope * len(accepted)))
            self._surprise += _SURPRISE_GAIN * (min(surprise, 10.0) - self._surprise)
            if self._surprise > _SURPRISING:
                self.weights_changed()

    def _believed(self, took: Sequence[float], noise: float) -> float:
        """What of the error of the newest arm's time is believed."""
        arm, far = self._newest, self._far[self._newest]
        errors = [each - self._times.of(arm) for each in took]
        error = median_low(errors)  # what waits for something else is slow
        most = _CLIP * sqrt(self._times.variance(arm) + noise)
        if abs(error) <= most or (far and far[-1] * error < 0):
            far.clear()
        if abs(error) <= most:
            return error
        far += [each for each in errors if abs(each) > most]
        in_force = self._in_a_row > 2
        if in_force and median_low(far) >= log(FAR) and sum(map(exp, far)) - len(far) < _WAITED:
            return 0.0
        if len(far) < (3 if error > 0 else 2):  # steps may wait for something else, but are not quick by chance
            return copysign(most, error)
        error = min(far, key=abs)
        far.clear()
        self._times.jump(arm, error, both=in_force)
        return error

    def weights_changed(self) -> None:
        """Another target or drafter: acceptance may be anything, and trees and chains differ otherwise by a little."""
        self._odds.drift(_ODDS[0], _LEAD_SWAP)
        self._surprise = 1.0

    def length(self, arm: Choice) -> float:
        """Expected accept length: tokens that a verify gives a request, the bonus token included."""
        if arm is None:
            return 1.0
        if arm.of_history:
            return self._foreseen[min(arm.num_steps, len(self._foreseen)) - 1] if self._foreseen else 1.0
        return expected_length(arm, self._odds.of(arm))

    def foresee(self, lengths: Sequence[float]) -> None:
        """Accept lengths of what history has for the present batch, by tokens drafted from one on."""
        self._foreseen = lengths

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected of a step."""
        return self._costs.seconds(arm, batch, cached) * exp(self._times.of(arm))

    def usual(self, arm: Choice, batch: int, cached: int) -> float:
        """Likewise, by what other arms have told, but for what moves all arms' steps now."""
        times = self._times
        return self._costs.seconds(arm, batch, cached) * exp(times.told[times.part[arm]])

    def rate(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected tokens per second, of all requests together."""
        return batch * self.length(arm) / self.seconds(arm, batch, cached)

    def read(self, tokens: int, seconds: float) -> None:
        """The drafter read so many tokens that it had missed, or seemed to take so long for them."""
        self._reading = _READING_KEPT * self._reading[0] + tokens, _READING_KEPT * self._reading[1] + seconds

    def reading(self, tokens: int) -> float:
        """Seconds expected for that; 0 as long as nothing is known."""
        return max(0.0, self._reading[1]) * tokens / self._reading[0] if self._reading[0] else 0.0

    def learned(self) -> Learned:
        """All of it, to be restored."""
        self.learn()
        odds, times = self._odds, self._times
        own = {arm: odds.mean[part] for arm, part in odds.part.items()}
        arms = ((arm, own.get(arm, 0.0), times.mean[part]) for arm, part in times.part.items())
        return Learned((odds.mean[0], times.mean[0]), tuple(arms), self._reading)

    def restore(self, learned: Learned) -> None:
        """Takes over what was learned of the arms that there still are."""
        (self._odds.mean[0], self._times.mean[0]), self._reading = learned.level, learned.reading
        for arm, odds, time in learned.arms:
            if arm in self._odds.part:
                self._odds.mean[self._odds.part[arm]] = odds
            if part := self._times.part.get(arm):
                self._times.mean[part], self._times.covariance[part][part] = time, _RESTARTED
        self._times.told = [*self._times.mean]


def lead(arm: Arm) -> float:
    """Log-odds of an arm's drafts over a chain's, before it was pulled."""
    return 0.0 if is_chain(arm) else TREE_LEAD


def expected_length(arm: Arm, odds: float) -> float:
    """Accept length, where each draft is accepted with these log-odds once those before it were."""
    return 1 + _drafts(arm.num_steps, odds)[1]


def _drafts(steps: int, odds: float) -> tuple[float, float]:
    """Acceptance of each draft, and how many of so many are on average."""
    rate = 1 / (1 + exp(-max(-_MOST_ODDS, min(_MOST_ODDS, odds))))
    return rate, rate * (1 - rate**steps) / (1 - rate)
