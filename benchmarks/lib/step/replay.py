"""The time of steps that nobody took: other batches, other accept lengths.

A rollout is replayed from its lengths and from the speed that each choice had at each batch size (lib/draining.py);
what else a step takes is what a token and an update took here. Each replay is held against what was measured: the
ratio is among the figures, and corrects it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.lib.draining import DecodeStep, Speeds
from benchmarks.lib.step.plan import FROZEN, OFF
from benchmarks.lib.step.running import Run, Taken
from tlt_server.strategy.arms import Choice

DRAWS = 200
ACCEPT_LENGTHS = (2, 3, 4)


class Rest(NamedTuple):
    """What a step takes beside its rollout: s a token that is learnt from, and s whatever the batch."""

    token_s: float
    fixed_s: float

    @classmethod
    def of(cls, steps: Sequence[Taken]) -> "Rest":
        """Of steps of one batch, whose tokens decide what their passes take."""
        learnt = [taken.step.learnt for taken in steps if taken.step.learnt is not None]
        token_s = sum(each.passes_s for each in learnt) / sum(each.tokens for each in learnt)
        passes = [taken.step.learnt.passes_s if taken.step.learnt else 0.0 for taken in steps]
        rest = [taken.whole_s - taken.step.rollout_s - took for taken, took in zip(steps, passes, strict=True)]
        return cls(token_s, median(rest))

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


class Replay:
    """Of one server's decode steps. sizes: batches that it runs without padding, ascending."""

    def __init__(
        self, steps: Sequence[DecodeStep], sizes: Sequence[int], runs: Mapping[str, Run], uncounted: int
    ) -> None:
        self._steps, self._sizes, self._speeds = steps, sizes, Speeds(steps, sizes)
        self._counted = {arm: run.steps[uncounted:] for arm, run in runs.items()}
        self.rest = Rest.of(self._counted[OFF])
        self.ratios = {arm: self._ratio(arm) for arm in (OFF, FROZEN) if arm in runs}
        """Measured rollouts over replayed ones, by arm: the median of its steps."""

    def drain(self, arm: str, lengths: Sequence[int]) -> float:
        """Seconds of a rollout by OFF; or by FROZEN, as the best choice of each size and what the bandit lost to it."""
        return self.ratios[arm] * self._speeds.replay(lengths, self._rule(arm))

    def steps(self, arm: str, prompts: int, group: int) -> list[float]:
        """Whole steps of so many prompts, of groups of responses that were sampled here."""
        groups = [
            taken.lengths[i : i + group] for taken in self._counted[OFF] for i in range(0, len(taken.lengths), group)
        ]
        read = fmean(
            taken.step.learnt.tokens / sum(taken.lengths)
            for taken in self._counted[OFF]
            if taken.step.learnt is not None
        )
        drawn, made = random.Random(prompts), []
        for _ in range(DRAWS):
            lengths = [length for one in drawn.choices(groups, k=prompts) for length in one]
            made.append(self.drain(arm, lengths) + self.rest.seconds(read * sum(lengths)))
        return made

    def speedup_at(self, accept_length: float) -> float:
        """Whole steps, by OFF over the best choice of each size, had every arm that accept length."""
        speeds = self._accepting(accept_length)
        over = [
            (
                self.ratios[OFF] * self._speeds.replay(taken.lengths, self._rule(OFF)) + rest,
                self.ratios.get(FROZEN, 1.0) * speeds.replay(taken.lengths, speeds.best) + rest,
            )
            for taken in self._counted[OFF]
            for rest in [taken.whole_s - taken.step.rollout_s]
        ]
        return sum(off for off, _ in over) / sum(best for _, best in over)

    def _rule(self, arm: str) -> Callable[[int], Choice]:
        return (lambda _: None) if arm == OFF else self._speeds.best

    def _ratio(self, arm: str) -> float:
        rule = self._rule(arm)
        return median(taken.step.rollout_s / self._speeds.replay(taken.lengths, rule) for taken in self._counted[arm])

    def _accepting(self, accept_length: float) -> Speeds:
        """As if each speculative step had given so many tokens a request, in the time that it took."""
        made = [step if step.arm is None else step._replace(tokens=accept_length * step.batch) for step in self._steps]
        return Speeds(made, self._sizes)
