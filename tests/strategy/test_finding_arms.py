"""A server that finds its arms itself: steps put together from passes, and which arms can pay at all."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.config import CANDIDATES, Arm
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts, Timing, from_passes
from tlt_server.strategy.defaults import LEADS, RATES, default_buckets, length, worth_having

SIZES = [1, 4, 16, 64]
LARGEST = SIZES[-1]
CAPTURED = {arm: max(1, min(LARGEST, 512 // arm.num_draft_tokens)) for arm in CANDIDATES}
shares = st.floats(0.5, 20)


@st.composite
def machines(draw: st.DrawFn) -> StepCosts:
    """Any cost of any arm, between half a plain step and twenty of them."""
    arms: tuple[Choice, ...] = (None, *CANDIDATES)
    return StepCosts(
        Timing(arm, size, 0, 0.005 * (1.0 if arm is None else draw(shares))) for arm in arms for size in SIZES
    )


def test_a_step_is_put_together_from_passes() -> None:
    """Verification of all nodes, all drafts but the first, and draft-extend over the path."""
    target = StepCosts([Timing(None, 1, 0, 1.0), Timing(None, 101, 0, 11.0)])
    drafter = StepCosts([Timing(None, 1, 0, 0.01), Timing(None, 101, 0, 1.01)])
    found = {(each.arm, each.batch): each.seconds for each in from_passes(target, drafter, [Arm(3, 2, 6)], [1, 4])}
    assert found == pytest.approx(
        {
            (None, 1): 1.0,
            (None, 4): 1.3,
            (Arm(3, 2, 6), 1): 1.5 + 2 * 0.02 + 0.04,
            (Arm(3, 2, 6), 4): 3.3 + 2 * 0.08 + 0.16,
        }
    )


@given(machines())
def test_what_is_given_up_is_missed_nowhere(costs: StepCosts) -> None:
    kept = worth_having(costs, CAPTURED, LARGEST)
    captured = {arm: CAPTURED[arm] for arm in kept}
    before = default_buckets(costs, CAPTURED, LARGEST)
    assert kept
    assert default_buckets(costs, captured, LARGEST) == before
    for arm in set(CANDIDATES) - set(kept):
        for size in (each for each in SIZES if each <= CAPTURED[arm]):
            for at in product(RATES, LEADS):
                rivals = {each: length(each, *at) for each, most in CAPTURED.items() if most >= size}
                best = max(made / costs.seconds(each, size, 0) for each, made in rivals.items())
                best = max(best, 1 / costs.seconds(None, size, 0))
                assert length(arm, *at) / costs.seconds(arm, size, 0) < 0.9 * best


def test_a_chain_between_two_that_stay_stays_though_it_was_timed_too_slow() -> None:
    chains = [Arm(steps, 1, steps + 1) for steps in (1, 3, 7)]
    costs = StepCosts(
        Timing(arm, 64, 0, seconds) for arm, seconds in zip((None, *chains), (1.0, 1.2, 3.0, 2.4), strict=True)
    )
    (bucket,) = default_buckets(costs, dict.fromkeys(chains, 64), 64)
    assert bucket.arms == (*chains, None)


def test_where_nothing_pays_one_arm_is_left() -> None:
    """Which buckets do not name, so that it is not explored: but a client may ask for it."""
    costs = StepCosts(
        Timing(arm, size, 0, 0.001 if arm is None else 1.0) for arm in (None, *CANDIDATES) for size in SIZES
    )
    (kept,) = worth_having(costs, CAPTURED, LARGEST)
    assert length(kept, RATES[-1], LEADS[-1]) == max(length(arm, RATES[-1], LEADS[-1]) for arm in CANDIDATES)
    assert [bucket.arms for bucket in default_buckets(costs, {kept: 1}, LARGEST)] == [(None,)]


def test_small_chains_have_a_place_where_few_requests_run() -> None:
    """With a drafter that knows little, of which branches bring little more. Steps in ms, as an H200 took them at its
    start, at 8 requests."""
    took = {None: 4.43, (1, 1, 2): 4.77, (3, 1, 4): 5.44, (5, 1, 6): 5.95, (5, 4, 16): 6.87, (11, 1, 12): 7.74}
    costs = StepCosts(Timing(arm and Arm(*arm), 8, 0, ms / 1000) for arm, ms in took.items())
    (bucket,) = default_buckets(costs, {arm: 8 for arm in costs.arms if arm}, 8)
    assert {Arm(1, 1, 2), Arm(3, 1, 4), Arm(5, 1, 6)} < set(bucket.arms)
