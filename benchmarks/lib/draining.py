"""A batch that drains: which part of it runs at which batch size, how fast each arm was there, and what the best would
have been.

Requests of given lengths, all at once, advance alike but for chance. So how many tokens each of them gains while `b`
are left follows from the lengths alone, and a drain's time under any rule from the speeds that were measured: that is
the replay, which an oracle, an offline table and a threshold are chosen by.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from tlt_server.config import Arm
from tlt_server.engine.decode.steplog import SettledStep
from tlt_server.strategy.arms import Choice

LEAST_STEPS = 5
"""From which on an arm's speed at a size is taken for measured."""


class DecodeStep(NamedTuple):
    """One decode step. tokens: of all its requests, which are `batch`."""

    arm: Choice
    batch: int
    tokens: int
    seconds: float


def decode_steps(steps: Sequence[SettledStep]) -> list[DecodeStep]:
    """Those of a log that followed another decode step, so that their time is theirs alone."""
    return [
        DecodeStep(step.arm, len(step.tokens), sum(step.tokens.values()), step.settled - before.settled)
        for before, step in pairwise(steps)
        if before.decode and step.decode and step.tokens
    ]


def decode_seconds(steps: Sequence[SettledStep]) -> float:
    """From the last prefill's end to the last decode step's."""
    live = [step for step in steps if step.tokens]
    prefills = [step.settled for step in live if not step.decode]
    return live[-1].settled - prefills[-1]


def spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Batch size, and the tokens that each request of it gains before the next one ends.

    Args:
        lengths: tokens that decode steps give each request.
    """
    ordered = sorted(lengths)
    for ended, (before, length) in enumerate(pairwise([0, *ordered])):
        if length > before:
            yield len(ordered) - ended, length - before


class Speeds:
    """Tokens/s of one request, by arm and captured batch size, which a smaller batch is padded to.

    Raises:
        ValueError: nothing was measured.
    """

    def __init__(self, steps: Iterable[DecodeStep], sizes: Sequence[int]) -> None:
        """sizes: ascending, up to the largest batch or beyond."""
        self._sizes = sizes
        tokens: dict[tuple[int, Choice], float] = defaultdict(float)
        seconds: dict[tuple[int, Choice], float] = defaultdict(float)
        count: Counter[tuple[int, Choice]] = Counter()
        for step in steps:
            key = self.size(step.batch), step.arm
            tokens[key] += step.tokens
            seconds[key] += step.batch * step.seconds
            count[key] += 1
        self._found: dict[int, dict[Choice, float]] = defaultdict(dict)
        for (size, arm), number in count.items():
            if number >= LEAST_STEPS:
                self._found[size][arm] = tokens[size, arm] / seconds[size, arm]
        if not self._found:
            raise ValueError(f"no arm has {LEAST_STEPS} decode steps at any batch size: let more requests drain")

    def size(self, batch: int) -> int:
        """The captured size that a batch runs at."""
        return self._sizes[min(bisect_left(self._sizes, batch), len(self._sizes) - 1)]

    def at(self, batch: int) -> Mapping[Choice, float]:
        """Of every arm that was measured there; where none was, at the nearest size with any."""
        size = self.size(batch)
        return self._found[min(self._found, key=lambda other: abs(self._sizes.index(other) - self._sizes.index(size)))]

    def best(self, batch: int) -> Choice:
        """The fastest arm."""
        found = self.at(batch)
        return max(found, key=lambda arm: found[arm])

    def table(self) -> dict[int, Choice]:
        """The fastest arm by the first batch size of each range, ascending; off beyond what was measured."""
        made: dict[int, Choice] = {}
        first, last = 1, max(self._found)
        for size in self._sizes[: self._sizes.index(last) + 1]:
            # of a size that no batch ran at, nothing is known: it goes with the one below, if that may be so
            arm = self.best(size) if size in self._found else None
            if not made or list(made.values())[-1] != arm:
                made[first] = arm
            first = size + 1
        if list(made.values())[-1] is not None:
            made[first] = None
        return made

    def replay(self, lengths: Sequence[int], rule: Callable[[int], Choice]) -> float:
        """Seconds of a drain by a rule from batch size to arm; where its arm was not measured, off or the slowest."""
        total = 0.0
        for batch, tokens in spans(lengths):
            found = self.at(batch)
            total += tokens / found.get(rule(batch), found.get(None, min(found.values())))
        return total

    def lost(self, steps: Sequence[DecodeStep]) -> float:
        """The share of their time that the best arms would have saved, had each arm its measured speed.

        It leaves out luck, which `replay` cannot know of: when a drain's last request ends. A step whose arm was not
        measured at its size is lost whole.
        """
        lost = total = 0.0
        for step in steps:
            found = self.at(step.batch)
            lost += step.seconds * (1 - found.get(step.arm, 0.0) / max(found.values()))
            total += step.seconds
        return lost / total

    def elastic(self, lengths: Sequence[int], most: Mapping[Arm, int]) -> tuple[Arm, int]:
        """The arm and the threshold above which it is off, that drain soonest in replay.

        Args:
            most: the largest batch size of each arm that may be chosen.
        """
        rules = [(arm, size) for arm, end in most.items() for size in self._sizes if size <= end]
        return min(rules, key=lambda rule: self.replay(lengths, lambda batch: rule[0] if batch <= rule[1] else None))


def switching_ms(steps: Sequence[DecodeStep]) -> float | None:
    """What a switch from one arm to another adds, where arms are drawn; None where no arm has `LEAST_STEPS` in a row.

    Under overlap a result is settled behind the launch of the next step, so that a switch may show in the step before
    it, or take from one step what it adds to the next. So all steps count, each by the median of those with the same
    arm, the same before it and the same after it, over the median where all three are one arm.
    """
    kinds: dict[tuple[int, Choice, Choice, Choice], list[float]] = defaultdict(list)
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        if before.batch == step.batch == after.batch:
            kinds[step.batch, before.arm, step.arm, after.arm].append(step.seconds)
    added = switches = 0.0
    for (batch, before_arm, arm, _), seconds in kinds.items():
        alone = kinds.get((batch, arm, arm, arm), ())
        if len(alone) >= LEAST_STEPS:
            added += len(seconds) * (median(seconds) - median(alone))
            switches += len(seconds) * (before_arm != arm)
    return 1000 * added / switches if switches else None


class Bin(NamedTuple):
    """A stretch of a drain. end_s: of its last step; running: requests, mean over its time; steps: by arm."""

    end_s: float
    running: float
    tokens_per_s: float
    steps: Mapping[Choice, int]


def trace(steps: Sequence[DecodeStep], bins: int) -> list[Bin]:
    """A drain in stretches that begin at equal distances; those in which no step begins are left out."""
    length = sum(step.seconds for step in steps) / bins
    groups: dict[int, list[DecodeStep]] = defaultdict(list)
    now, ends = 0.0, {}
    for step in steps:
        number = min(bins - 1, int(now / length))
        groups[number].append(step)
        now += step.seconds
        ends[number] = now
    made = []
    for number, group in sorted(groups.items()):
        seconds = sum(step.seconds for step in group)
        running = sum(step.batch * step.seconds for step in group) / seconds
        tokens = sum(step.tokens for step in group)
        made.append(Bin(ends[number], running, tokens / seconds, Counter(step.arm for step in group)))
    return made
