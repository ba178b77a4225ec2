"""A server that exists only in its figures: what a decode step costs and what is accepted, as measured on an H200.

Costs are the medians of speedup.h200.json beside this file, by arm and batch size, plus what context.h200.json says
that each cached token adds. They are kept here: strategies are held against the same world whatever a step costs today.
A batch between two sizes runs at the larger one. (A tree's slope was not measured: it is taken
to be that of the deepest chain, for both verify with one pass over the cache.) Accept lengths are the means of the
former over all batch sizes. What the medians and means have lost is put back: every step's time scatters, some steps
wait for something else, and a request is hard to draft for, or easy, for dozens of steps together. What the drafter
takes to read what it missed is of a step log that is not kept: 47 requests, 98 tokens each, 8 to 13 ms. What a
step takes beyond what timing says is of servers' logs, not kept either, and of what each arm took by itself when
strategies were measured at 79e2d28. How others disturb a machine is made up.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks.lib.sides import name_of
from tlt_server.config import Arm
from tlt_server.results import Figures, read
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts, Timing

MEASURED = Path(__file__).parent
CHAINS = tuple(Arm(steps, 1, steps + 1) for steps in (1, 3, 5, 7))
TREES = {Arm(5, 4, 8): 128, Arm(5, 4, 16): 64, Arm(8, 4, 32): 16}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CAPTURED = dict.fromkeys(CHAINS, max(BATCHES)) | TREES
CONTEXT = 200  # tokens of a request, on average, where costs were measured
_LEVELS = (-0.8, 0.0, 0.8)  # log-odds by which a request is harder or easier than others
_STAY = 30  # steps that it stays so, on average
_SCATTER = 0.03  # of a step's time, as the standard deviation of its logarithm
_HICCUP = 0.005  # the share of steps that wait for something else, two to five times as long
_BESIDES = 1.18, 1.1  # times as long as timing says that a step with an arm takes, and one without
_ALONE, _SHARED = 2.0, 0.7  # seconds that a disturbed machine is ours, and then others' as well, on average
_READING, _READING_TOKEN = 0.0005, 2.3e-6  # seconds that the drafter takes to read what it missed, and each token of it


def measured_costs(figures: Figures, contexts: Figures) -> list[Timing]:
    """Step times at the measured batch sizes, at the context where they were measured and at one of 8,192 tokens."""
    slopes = {arm: _slope(contexts, _side(arm)) for arm in (None, CHAINS[1], CHAINS[3])}
    timings = []
    for arm, most in {None: max(BATCHES), **CAPTURED}.items():
        slope = slopes.get(arm, slopes[CHAINS[3]])
        for batch in (batch for batch in BATCHES if batch <= most):
            seconds = figures[f"step_ms_{_side(arm)}_batch_{batch}"] / 1000
            timings.append(Timing(arm, batch, CONTEXT * batch, seconds))
            timings.append(Timing(arm, batch, 8192 * batch, seconds + slope * (8192 - CONTEXT) * batch))
    return timings


def context_timings(contexts: Figures, side: str) -> list[tuple[int, int, float]]:
    """Measured (batch, cached tokens, seconds) of one side, at three contexts."""
    cells = [(batch, context) for context in (512, 8192, 32768) for batch in (1, 8, 32)]
    names = {(batch, context): f"step_ms_{side}_context_{context}_batch_{batch}" for batch, context in cells}
    return [(b, b * c, contexts[name] / 1000) for (b, c), name in names.items() if name in contexts]


def _slope(contexts: Figures, side: str) -> float:
    """Seconds that each cached token adds, at the batch size of 8, where it is most of the step."""
    found = {cached: seconds for batch, cached, seconds in context_timings(contexts, side) if batch == 8}
    few, many = min(found), max(found)
    return (found[many] - found[few]) / (many - few)


def _side(arm: Choice) -> str:
    return "plain" if arm is None else name_of(arm)


def _survival(logits: Sequence[float], level: float) -> list[float]:
    """Probability that a draft is accepted to each depth and beyond."""
    survival, found = 1.0, []
    for logit in logits:
        survival /= 1 + exp(-logit - level)
        found.append(survival)
    return found


def mean_accepted(logits: Sequence[float]) -> float:
    """Drafts accepted by one verify, over requests of all levels."""
    return fmean(sum(_survival(logits, level)) for level in _LEVELS)


def _extended(logits: list[float], depth: int, accepted: float) -> list[float]:
    """Logits to a depth, the new ones equal, with which so many drafts are accepted on average."""
    low, high = -6.0, 12.0
    for _ in range(50):
        middle = (low + high) / 2
        more = logits + [middle] * (depth - len(logits))
        low, high = (middle, high) if mean_accepted(more) < accepted else (low, middle)
    return more


def measured_logits(figures: Figures) -> dict[Arm, list[float]]:
    """By arm, the log-odds that a draft is accepted where those before it are, by depth."""
    means = {
        arm: fmean(figures[f"accept_length_{name_of(arm)}_batch_{batch}"] for batch in BATCHES if batch <= most) - 1
        for arm, most in CAPTURED.items()
    }
    chain: list[float] = []
    for arm in CHAINS:
        chain = _extended(chain, arm.num_steps, means[arm])
    return {arm: chain[: arm.num_steps] for arm in CHAINS} | {
        arm: _extended([], arm.num_steps, means[arm]) for arm in TREES
    }


@cache
def _measured() -> tuple[list[Timing], dict[Arm, list[float]]]:
    figures, contexts = (read(MEASURED / f"{name}.h200.json").figures for name in ("speedup", "context"))
    return measured_costs(figures, contexts), measured_logits(figures)


@dataclass
class World:
    """The simulated machine, drafter and text.

    slower: times as long as measured that an arm's steps take.
    easier: log-odds by which an arm's drafts are accepted more readily than measured; None for all arms.
    disturbed: every few seconds others have the machine for a while, and all arms take longer.
    """

    random: Random
    slower: dict[Choice, float] = field(default_factory=dict)
    easier: dict[Choice, float] = field(default_factory=dict)
    disturbed: bool = False

    def __post_init__(self) -> None:
        self._timings, self._logits = _measured()
        self._costs = StepCosts(self._timings, padded=True)
        self._laws: dict[tuple[Arm, float], tuple[float, list[list[float]]]] = {}
        self._share, self._left = 1.0, 0.0  # times as long as alone that a step takes, and seconds for which it does

    def timed_at_start(self) -> list[Timing]:
        """What timing finds: the GPU's part alone, without context; an arm is off by 5 %, and a cell by 2 %."""
        off = {arm: exp(self.random.gauss(0, 0.05)) / _BESIDES[arm is None] for arm in [None, *CAPTURED]}
        cells = [(t.arm, t.batch) for t in self._timings if t.cached == CONTEXT * t.batch]
        return [
            Timing(arm, batch, 0, self._costs.seconds(arm, batch, 0) * off[arm] * exp(self.random.gauss(0, 0.02)))
            for arm, batch in cells
        ]

    def seconds(self, arm: Choice, batch: int, cached: int) -> float:
        """Mean of a step, hiccups left out."""
        return self._costs.seconds(arm, batch, cached) * self.slower.get(arm, 1.0)

    @staticmethod
    def reading(tokens: int) -> float:
        """Seconds that the drafter takes for so many tokens that it missed while steps did not speculate."""
        return _READING + _READING_TOKEN * tokens if tokens else 0.0

    def rate(self, arm: Choice, batch: int, cached: int) -> float:
        """Mean tokens per second."""
        length = 1.0 if arm is None else 1 + self._law(arm)[0]
        return batch * length / self.seconds(arm, batch, cached)

    def step(self, arm: Choice, levels: list[int], cached: int) -> tuple[list[int], float]:
        """One decode step: accepted drafts of each request, and seconds.

        levels: how easy each request is to draft for; changed in place.
        """
        draw = self.random
        seconds = self.seconds(arm, len(levels), cached) * exp(draw.gauss(0, _SCATTER))
        if draw.random() < _HICCUP:
            seconds *= draw.uniform(2, 5)
        if self.disturbed:
            seconds *= self._sharing(seconds)
        moving, rest = divmod(len(levels), _STAY)
        for _ in range(moving + (draw.random() < rest / _STAY)):
            levels[draw.randrange(len(levels))] = draw.randrange(len(_LEVELS))
        if arm is None:
            return [0] * len(levels), seconds
        laws = self._law(arm)[1]
        return [bisect(laws[level], draw.random()) for level in levels], seconds

    def _sharing(self, seconds: float) -> float:
        """How many times as long a step takes; it would take so many seconds alone."""
        self._left -= seconds
        if self._left < 0:
            self._share = 1.0 if self._share > 1 else self.random.uniform(1.05, 1.35)
            self._left = self.random.expovariate(1 / (_ALONE if self._share == 1 else _SHARED))
        return self._share

    def new_levels(self, batch: int) -> list[int]:
        """Of so many new requests."""
        return [self.random.randrange(len(_LEVELS)) for _ in range(batch)]

    def _law(self, arm: Arm) -> tuple[float, list[list[float]]]:
        """Mean accepted drafts, and for each level the probabilities of accepting at most 0, 1, ... of them."""
        easier = self.easier.get(None, 0.0) + self.easier.get(arm, 0.0)
        if (arm, easier) not in self._laws:
            logits = [logit + easier for logit in self._logits[arm]]
            laws = [[1 - survival for survival in _survival(logits, level)] for level in _LEVELS]
            self._laws[arm, easier] = mean_accepted(logits), laws
        return self._laws[arm, easier]
