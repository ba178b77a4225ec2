"""A server's own buckets: from start-up timing, so that no table of cards is needed; or without it."""

from collections.abc import Mapping
from itertools import product
from math import log

from tlt_server.config.arm import Arm, Source
from tlt_server.strategy.acceptance import expected_length
from tlt_server.strategy.arms import Bucket, Choice, is_chain
from tlt_server.strategy.costs import StepCosts

RATES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Acceptance of each draft, given those before it, that a drafter may reach, now or after training."""
LEADS = (0.4, 1.0)
"""Log-odds of a tree's drafts over a chain's, as measured: by the greater alone, small chains have no place where few
requests run, though with a drafter that knows little they may be best there."""
_NEAR = 0.9
"""An arm is retained after profiling where it comes so near the best at one of these rates."""
_UNTIMED = (1, 4, 16, 64)
"""Batch sizes at which a bucket ends where nothing was timed: up to four times as many requests are much alike."""


def default_buckets(costs: StepCosts, captured: Mapping[Arm, int], largest: int) -> list[Bucket]:
    """At each batch size that was timed, the arms that could be best there, and off; equal neighbours are one bucket.

    captured: the largest batch size that each arm has CUDA graphs for. largest: that the server runs.
    """
    buckets: list[Bucket] = []
    first = 1
    for last in [size for size in costs.sizes if size < largest] + [largest]:
        arms = _could_be_best(costs, [arm for arm, most in captured.items() if most >= last], last)
        if not buckets or buckets[-1].arms != arms:
            buckets.append(Bucket(first, arms))
        first = last + 1
    return buckets


def worth_having(costs: StepCosts, captured: Mapping[Arm, int], largest: int) -> tuple[Arm, ...]:
    """The arms that have a place in a default bucket; the best at batch size 1 where nothing beats plain decoding."""
    placed = {arm for bucket in default_buckets(costs, captured, largest) for arm in bucket.arms}
    best = max(captured, key=lambda arm: length(arm, RATES[-1], LEADS[-1]) / costs.seconds(arm, 1, 0))
    return tuple(arm for arm in captured if arm in placed) or (best,)


def untimed_buckets(captured: Mapping[Arm, int], largest: int) -> list[Bucket]:
    """Where nothing was timed: every arm wherever it was captured, and off."""
    lasts = [*sorted({end for end in (*_UNTIMED, *captured.values()) if end < largest}), largest]
    firsts = [1, *(last + 1 for last in lasts[:-1])]
    of_size = {last: tuple(arm for arm, most in captured.items() if most >= last) for last in lasts}
    return [Bucket(first, (*of_size[last], None)) for first, last in zip(firsts, lasts, strict=True)]


def _could_be_best(costs: StepCosts, contenders: list[Arm], batch: int) -> tuple[Choice, ...]:
    """A chain between two that could be stays too: costs grow evenly with depth, so it was timed too slow. Arms of
    history are cheaper at any rate, but rates are their own: they are held against one another alone."""
    found = set()
    for source in Source:
        found |= _best_of(costs, [arm for arm in contenders if arm.source is source], batch)
    return (*(arm for arm in contenders if arm in found), None)


def _best_of(costs: StepCosts, contenders: list[Arm], batch: int) -> set[Arm]:
    """Of arms of one source."""
    found: set[Arm] = set()
    for rate, lead in product(RATES, LEADS):
        made = {arm: length(arm, rate, lead) / costs.seconds(arm, batch, 0) for arm in contenders}
        best = max([1 / costs.seconds(None, batch, 0), *made.values()])
        found.update(arm for arm in contenders if made[arm] >= _NEAR * best)
    depths = [arm.num_steps for arm in found if is_chain(arm)] or [0]
    between = {arm for arm in contenders if is_chain(arm) and min(depths) < arm.num_steps < max(depths)}
    return found | between


def length(arm: Arm, rate: float, lead: float) -> float:
    """Accept length, where each draft of a chain is accepted at one rate; a tree's at log-odds greater by `lead`."""
    return expected_length(arm, log(rate / (1 - rate)) + (0.0 if is_chain(arm) else lead))
