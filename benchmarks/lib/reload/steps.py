"""What drafter swaps cost, from the log of settled steps: step times beside a swap, accept lengths after one.

An interval lies between two settled steps. It is a step's time where both are decode steps of the whole batch; where
one is a prefill, or a request has ended, it says nothing of swaps.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from tlt_server.engine.decode.steplog import SettledStep

Tokens = tuple[int, ...]


class Span(NamedTuple):
    """Seconds of the monotonic clock."""

    begin: float
    end: float


class Disturbance(NamedTuple):
    """What the steps beside one swap took.

    ms: each.
    lost_ms: their time above the median, summed: how much longer than an undisturbed step each took, or shorter.
    """

    ms: tuple[float, ...]
    lost_ms: float

    @property
    def worst_ms(self) -> float:
        return max(self.ms)


@dataclass(frozen=True)
class Intervals:
    """The intervals of a log, in order.

    ends: when each ended; it began where the one before ended.
    ms: their lengths in milliseconds; None where it is not a step's time.
    """

    ends: Sequence[float]
    ms: Sequence[float | None]

    @classmethod
    def of(cls, steps: Sequence[SettledStep], batch: int) -> "Intervals":
        """Those of a batch of so many requests."""
        whole = [step.decode and len(step.tokens) == batch for step in steps]
        lengths = [
            1000 * (after.settled - before.settled) if both else None
            for (before, after), both in zip(pairwise(steps), map(all, pairwise(whole)), strict=True)
        ]
        return cls([step.settled for step in steps[1:]], lengths)

    def within(self, span: Span) -> list[float | None]:
        """Those that overlap a span."""
        first = bisect_left(self.ends, span.begin)
        last = bisect_left(self.ends, span.end)
        return list(self.ms[first : last + 1])

    def median_ms(self, spans: Sequence[Span]) -> float:
        """Of the steps in these spans."""
        return median(ms for span in spans for ms in self.within(span) if ms is not None)

    def disturbance(self, span: Span, median_ms: float) -> Disturbance | None:
        """What a swap did; None where a prefill or the end of a request fell beside it."""
        found = self.within(span)
        times = [ms for ms in found if ms is not None]
        if not times or len(times) < len(found):
            return None
        return Disturbance(tuple(times), sum(ms - median_ms for ms in times))


def taken_up(steps: Sequence[SettledStep], swapped: Span, version: int) -> Span:
    """A swap's span, up to the first step that the new drafter drafted; under overlap that is settled a step later."""
    first = bisect_left(steps, swapped.end, key=lambda step: step.settled)
    for step in steps[first : first + 3]:
        if step.drafter_version is not None and step.drafter_version >= version:
            return Span(swapped.begin, step.settled)
    return swapped


def cut(span: Span, seconds: float) -> list[Span]:
    """A span in pieces of this length, without what is left over: swaps that did not happen, to compare with."""
    count = int((span.end - span.begin) / seconds)
    return [Span(span.begin + i * seconds, span.begin + (i + 1) * seconds) for i in range(count)]


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))]


def starts_of(steps: Sequence[SettledStep], version: int) -> dict[str, int]:
    """How many tokens each request had when the drafter of this version first drafted for it, by rid."""
    starts: dict[str, int] = {}
    lengths: dict[str, int] = {}
    for step in steps:
        for rid, count in step.tokens.items():
            if step.decode and step.drafter_version == version:
                starts.setdefault(rid, lengths.get(rid, 0))
            lengths[rid] = lengths.get(rid, 0) + count
    return starts


def accept_length(steps: Sequence[SettledStep], starts: Mapping[str, int], tokens: int) -> float:
    """Mean tokens of the decode steps that began within so many tokens after each request's start."""
    given: dict[str, list[int]] = {}
    for step in steps:
        for rid, count in step.tokens.items():
            given.setdefault(rid, []).append(count)
    found = [
        count
        for rid, start in starts.items()
        for began, count in zip(accumulate(given[rid], initial=0), given[rid], strict=False)
        if start <= began < start + tokens and began > 0  # a request's first token is the prefill's
    ]
    return sum(found) / len(found)
