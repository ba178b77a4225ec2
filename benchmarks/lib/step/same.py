"""Have all arms learnt the same? Rewards, held-out accuracy, and the policies themselves, against those of `off`."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev

from torch import Tensor

from benchmarks.lib.step.plan import AGAIN, COMPARED_STEPS, FROZEN, MUTED, OFF, ONLINE, STATIC
from benchmarks.lib.step.policy import Learner, divergence, laws
from benchmarks.lib.step.running import Compared, Kept, Run
from tlt_server.results import Figures

COMPARED = (STATIC, FROZEN, ONLINE, MUTED)
"""With OFF."""


class Against:
    """Holds arms of one seed against `off`, as soon as both are there. end: batch and seed, in the figures' names."""

    def __init__(self, kept: Kept, learner: Learner, sequences: Sequence[tuple[int, ...]], end: str) -> None:
        self._kept, self._learner, self._sequences, self._end = kept, learner, sequences, end
        self._waiting: dict[str, Compared] = {}
        self._off = kept.find(OFF, end)

    def figures(self, run: Run) -> Figures:
        """What its coming allows to be said. The learner's weights are other ones afterwards."""
        self._kept.add(run, self._end)
        if run.arm == OFF:
            self._off = run.compared
        else:
            self._waiting[run.arm] = run.compared
        if self._off is None:
            return {}
        arms, self._waiting = self._waiting, {}
        return compared(arms, self._off, self._learner, self._sequences, self._end)


def compared(
    arms: Mapping[str, Compared], off: Compared, learner: Learner, sequences: Sequence[tuple[int, ...]], end: str
) -> Figures:
    """Arms against `off`: responses of the first step that differ, and the policies' divergence after some steps."""
    figures: Figures = {}

    def found(arm: Compared, number: int) -> list[Tensor]:
        learner.small.load_state_dict(arm.policies[number], strict=False)
        return laws(learner.small, sequences)

    base = {number: found(off, number) for number in COMPARED_STEPS if number in off.policies}
    for name, arm in arms.items():
        if name != AGAIN:
            differing = sum(one != other for one, other in zip(arm.texts, off.texts, strict=True))
            figures[f"first_step_differing_{name}_{end}"] = differing
        for number in base.keys() & arm.policies.keys():
            figures[f"divergence_{name}_{end}_step_{number}"] = divergence(found(arm, number), base[number])
    return figures


def same(figures: Figures, what: str) -> Figures:
    """Of all seeds together. Partial rollouts' steps are not of the same problems."""
    rewards = {} if what.endswith("_partial") else _rewards(figures, what)
    return rewards | _accuracies(figures, what) | _divergences(figures, what)


def _rewards(figures: Figures, what: str) -> Figures:
    """The mean difference of an arm's reward to that of `off`, step by step on the same problems, in standard errors;
    the largest of all arms."""
    gaps = {}
    for arm in COMPARED:
        pairs = list(_pairs(figures, arm, what))
        if len(pairs) > 1 and (error := stdev(pairs) / len(pairs) ** 0.5):
            gaps[f"reward_gap_in_errors_{arm}_{what}"] = fmean(pairs) / error
    worst = {f"reward_gap_in_errors_{what}": max(abs(value) for value in gaps.values())} if gaps else {}
    return gaps | worst


def _pairs(figures: Figures, arm: str, what: str) -> Iterator[float]:
    form = re.compile(rf"reward_{arm}_({re.escape(what)}_seed_\d+_step_\d+)")
    for name, value in figures.items():
        if (match := form.fullmatch(name)) and (other := figures.get(f"reward_{OFF}_{match[1]}")) is not None:
            yield value - other


def _accuracies(figures: Figures, what: str) -> Figures:
    """The largest difference of an arm's held-out accuracy to that of `off`, all seeds together, in standard errors."""
    found = {arm: _right(figures, arm, what) for arm in (OFF, *COMPARED)}
    right, asked = found.pop(OFF)
    gaps = {}
    for arm, (of_arm, count) in found.items():
        if asked and count:
            both = (right + of_arm) / (asked + count)
            error = (both * (1 - both) * (1 / asked + 1 / count)) ** 0.5
            gaps[arm] = abs(of_arm / count - right / asked) / error if error else 0.0
    return {f"accuracy_gap_in_errors_{what}": max(gaps.values())} if gaps else {}


def _right(figures: Figures, arm: str, what: str) -> tuple[float, float]:
    """Of all seeds, problems that were solved, and problems."""
    form = re.compile(rf"accuracy_{arm}_({re.escape(what)}_seed_\d+)")
    found = [
        (value, figures[f"held_out_{arm}_{match[1]}"])
        for name, value in figures.items()
        if (match := form.fullmatch(name))
    ]
    return sum(share * count for share, count in found), sum(count for _, count in found)


def _divergences(figures: Figures, what: str) -> Figures:
    """How far arms have come from `off`, over how far `again` has, which differs by seeds of sampling: the largest of
    all arms and steps, each of these the mean of its seeds."""
    form = re.compile(rf"divergence_([a-z]+)_{re.escape(what)}_seed_\d+_step_(\d+)")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, value in figures.items():
        if match := form.fullmatch(name):
            found[match[1], match[2]].append(value)
    over = [
        fmean(values) / base
        for (arm, step), values in found.items()
        if arm != AGAIN and (base := fmean(found.get((AGAIN, step), [0.0])))
    ]
    return {f"divergence_over_again_{what}": max(over)} if over else {}
