"""What each arm is expected to make: batch size * accept length / step seconds, whose halves are learned apart.

Of acceptance see acceptance.py. Step time, in logarithms of seconds over what timing said, is a sum of what all arms
share, their level, and of an arm's own: long requests, or others on the machine, move all. So the arm that runs tells
the level, an exploration step its arm's own, and whose a jump was.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import copysign, exp, inf, log, sqrt
from statistics import median_low
from typing import Annotated

import msgspec

from tlt_server.strategy.acceptance import DEPTHS, Acceptance
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.filter import Sums

_TIMES = 0.03**2, 0.1**2
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
TOGETHER = 4
"""Results of one arm that are learned from at once: none of them matters alone."""
_READING_KEPT = 0.9
"""Of what reading took before, with each time that the drafter reads what it missed."""

Bounded = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Count = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Learned(msgspec.Struct, frozen=True):
    """All that is worth keeping over a restart, as JSON can hold it.

    level: of acceptance, then of step time. depths: what each has of acceptance beside the level. arms: each with its
    lead, 0 for chains, and its own step time. reading: how often the drafter read what it had missed, how many tokens,
    and for how many seconds.
    """

    level: tuple[Bounded, Bounded]
    depths: Annotated[tuple[Bounded, ...], msgspec.Meta(min_length=len(DEPTHS) + 1, max_length=len(DEPTHS) + 1)]
    arms: tuple[tuple[Choice, Bounded, Bounded], ...]
    reading: tuple[Count, Count, Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]]


class Estimates:
    """Expected rewards of all arms. costs: of every arm, and of off.

    What a draft of history gives is foreseen for the present batch (`foresee`), not learned here: its results move no
    level that a drafter's arms have.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._acceptance = Acceptance([arm for arm in costs.arms if arm and not arm.of_history])
        self._foreseen: Sequence[float] = ()
        self._part = {arm: part for part, arm in enumerate(costs.arms, start=1)}  # of step times
        others = len(self._part)
        level, own = _TIMES
        self._times = Sums([0.0] * (1 + others), [level] + [own] * others, [inf] + [_RESTARTED] * others)
        self._far: dict[Choice, list[float]] = defaultdict(list)
        self._newest: Choice = None
        self._in_a_row = 0  # of the newest arm
        self._steps = 0  # of them, not learned from yet
        self._accepted: list[int] = []
        self._took: list[float] = []
        self._reading = 0.0, 0.0, 0.0

    def observe(self, arm: Choice, accepted: Sequence[int], expected: float, seconds: float | None) -> None:
        """A settled step, of so many seconds expected; None where they were not the arm's doing."""
        took = None if seconds is None else log(seconds / expected) + self._slower(arm)
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
            self._acceptance.drift(steps, len(accepted))
            if self._newest is not None and not self._newest.of_history:
                self._acceptance.learn(self._newest, accepted)
        if took:
            self._times.drift(len(took) * _COMMON_DRIFT, len(took) * _OWN_DRIFT)
            noise = _SCATTER / len(took)
            self._times.learn((0, self._part[self._newest]), self._believed(took, noise), noise)

    def _believed(self, took: Sequence[float], noise: float) -> float:
        """What of the error of the newest arm's time is believed."""
        arm, far = self._newest, self._far[self._newest]
        errors = [each - self._slower(arm) for each in took]
        error = median_low(errors)  # what waits for something else is slow
        most = _CLIP * sqrt(self._times.variance((0, self._part[arm])) + noise)
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
        self._times.jump(self._part[arm], error, both=in_force)
        return error

    def weights_changed(self) -> None:
        """Another target or drafter."""
        self._acceptance.weights_changed()

    def length(self, arm: Choice) -> float:
        """Expected accept length: tokens that a verify gives a request, the bonus token included."""
        if arm is None:
            return 1.0
        if arm.of_history:
            return self._foreseen[min(arm.num_steps, len(self._foreseen)) - 1] if self._foreseen else 1.0
        return self._acceptance.length(arm)

    def foresee(self, lengths: Sequence[float]) -> None:
        """Accept lengths of what history has for the present batch, by tokens drafted from one on."""
        self._foreseen = lengths

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected of a step."""
        return self._costs.seconds(arm, batch, cached) * exp(self._slower(arm))

    def usual(self, arm: Choice, batch: int, cached: int) -> float:
        """Likewise, by what other arms have told, but for what moves all arms' steps now."""
        return self._costs.seconds(arm, batch, cached) * exp(self._times.told[self._part[arm]])

    def rate(self, arm: Choice, batch: int, cached: int) -> float:
        """Expected tokens per second, of all requests together."""
        return batch * self.length(arm) / self.seconds(arm, batch, cached)

    def read(self, tokens: int, seconds: float) -> None:
        """The drafter read so many tokens that it had missed, or seemed to take so long for them."""
        reads, read, took = (_READING_KEPT * each for each in self._reading)
        self._reading = reads + 1, read + tokens, took + seconds

    def reading(self, tokens: int) -> float:
        """Seconds expected for that; 0 as long as nothing is known. Of more tokens than usual no more than usual: for
        few it is a pass, whatever their number, and what one request took says little of a hundred."""
        reads, read, seconds = self._reading
        return max(0.0, seconds) * min(1 / reads, tokens / read) if reads and read else 0.0

    def learned(self) -> Learned:
        """All of it, to be restored."""
        self.learn()
        level, depths, leads = self._acceptance.learned()
        times = self._times.mean
        arms = ((arm, leads.get(arm, 0.0) if arm else 0.0, times[part]) for arm, part in self._part.items())
        return Learned((level, times[0]), depths, tuple(arms), self._reading)

    def restore(self, learned: Learned) -> None:
        """Takes over what was learned of the arms that there still are."""
        level, self._times.mean[0] = learned.level
        self._acceptance.restore(level, learned.depths, {arm: lead for arm, lead, _ in learned.arms if arm})
        self._reading = learned.reading
        for arm, _, time in learned.arms:
            if part := self._part.get(arm):
                self._times.mean[part], self._times.covariance[part][part] = time, _RESTARTED
        self._times.told = [*self._times.mean]

    def _slower(self, arm: Choice) -> float:
        """Logarithm of how many times as long as timed an arm's steps take."""
        return self._times.of((0, self._part[arm]))
