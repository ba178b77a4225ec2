"""A server's own buckets: from start-up timing, so that no table of cards is needed; or without it."""

from collections.abc import Mapping
from math import exp

from tlt_server.config import Arm
from tlt_server.strategy.acceptance import TREE_LEAD
from tlt_server.strategy.arms import Bucket, Choice, is_chain
from tlt_server.strategy.costs import StepCosts

RATES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Acceptance of each draft, given those before it, that a drafter may reach, now or after training."""
_UNTIMED = (1, 4, 16, 64)
"""Batch sizes at which a bucket ends: up to four times as many requests are much alike."""
_NEAR = 0.9
"""An arm stays that comes so near the best at one of these rates."""


def default_buckets(costs: StepCosts, captured: Mapping[Arm, int], largest: int) -> list[Bucket]:
    """For each batch size that was timed, the arms that could be best there, and off; equal neighbours are one bucket.

    An arm that loses at every rate of acceptance is left out: it would cost exploration for ever, and memory. A chain
    between two that stay also stays: what a step costs grows evenly with depth, so that at some rate between theirs it
    is the best, or nearly so. Where it seems to lose at every rate, it was timed too slow.

    Args:
        costs: from timing. A bucket ends at a batch size that was timed, and the last at `largest`.
        captured: the largest batch size that each arm has CUDA graphs for.
        largest: batch size that the server runs.
    """
    buckets: list[Bucket] = []
    first = 1
    for last in [size for size in costs.sizes if size < largest] + [largest]:
        contenders = [arm for arm, most in captured.items() if most >= last]
        arms = tuple(_could_be_best(costs, contenders, last))
        if not buckets or buckets[-1].arms != arms:
            buckets.append(Bucket(first, arms))
        first = last + 1
    return buckets


def worth_having(costs: StepCosts, captured: Mapping[Arm, int], largest: int) -> tuple[Arm, ...]:
    """The arms that have a place in a bucket; the best at batch size 1 where nothing beats plain decoding.

    Arguments are those of `default_buckets`, which are the same with these arms alone.
    """
    placed = {arm for bucket in default_buckets(costs, captured, largest) for arm in bucket.arms}
    found = tuple(arm for arm in captured if arm in placed)
    return found or (max(captured, key=lambda arm: expected_length(arm, RATES[-1]) / costs.seconds(arm, 1, 0)),)


def untimed_buckets(captured: Mapping[Arm, int], largest: int) -> list[Bucket]:
    """Where nothing was timed: every arm wherever it was captured, and off."""
    ends = sorted({end for end in (*_UNTIMED, *captured.values()) if end < largest})
    return [
        Bucket(first, (*(arm for arm, most in captured.items() if most >= last), None))
        for first, last in zip([1, *(end + 1 for end in ends)], [*ends, largest], strict=True)
    ]


def _could_be_best(costs: StepCosts, contenders: list[Arm], batch: int) -> list[Choice]:
    found: set[Arm] = set()
    for rate in RATES:
        made = {arm: expected_length(arm, rate) / costs.seconds(arm, batch, 0) for arm in contenders}
        best = max([1 / costs.seconds(None, batch, 0), *made.values()])
        found.update(arm for arm in contenders if made[arm] >= _NEAR * best)
    depths = [arm.num_steps for arm in found if is_chain(arm)] or [0]
    between = [arm for arm in contenders if is_chain(arm) and min(depths) < arm.num_steps < max(depths)]
    return [*(arm for arm in contenders if arm in found or arm in between), None]


def expected_length(arm: Arm, rate: float) -> float:
    """Accept length, where each draft is accepted at one rate; a tree of its usual lead."""
    share = sum(rate**depth for depth in range(1, arm.num_steps + 1)) / arm.num_steps
    odds = share / (1 - share) * (1.0 if is_chain(arm) else exp(TREE_LEAD))
    return 1 + arm.num_steps * odds / (1 + odds)
