"""What is expected to be accepted: of arms that were pulled, and of those that were not."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.config import Arm
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts, Timing
from tlt_server.strategy.estimates import Estimates

CHAINS = [Arm(steps, 1, steps + 1) for steps in (1, 3, 7)]
TREE = Arm(5, 4, 16)
ONE, THREE, SEVEN = CHAINS


class Acceptance(Estimates):
    """Of steps whose time is not known."""

    def __init__(self) -> None:
        super().__init__(StepCosts(Timing(arm, 1, 0, 1.0) for arm in (None, *CHAINS, TREE)))

    def see(self, arm: Choice, accepted: list[int]) -> None:
        self.observe(arm, accepted, 1.0, None)


def accepted(random: Random, rate: float, steps: int, batch: int = 8) -> list[int]:
    """By so many requests, at one rate to a depth."""
    return [next((k for k in range(steps) if random.random() > rate), steps) for _ in range(batch)]


def length(rate: float, steps: int) -> float:
    return sum(rate**depth for depth in range(steps + 1))


def fed(arm: Arm, rate: float, steps: int = 400, batch: int = 8) -> Acceptance:
    known, random = Acceptance(), Random(1)
    for _ in range(steps):
        known.see(arm, accepted(random, rate, arm.num_steps, batch))
    return known


@pytest.mark.parametrize("rate", [0.5, 0.9])
@pytest.mark.parametrize("pulled", [THREE, SEVEN])
def test_one_chain_tells_of_all(pulled: Arm, rate: float) -> None:
    known = fed(pulled, rate)
    for arm in CHAINS:
        assert known.length(arm) == pytest.approx(length(rate, arm.num_steps), rel=0.08), arm


def test_a_chain_tells_of_all_though_some_requests_are_easy_and_some_hard() -> None:
    """Who gets far is easy to draft for: deeper drafts are accepted more readily than the first."""
    known, random = Acceptance(), Random(5)
    for _ in range(400):
        known.see(SEVEN, [*accepted(random, 0.5, 7, 4), *accepted(random, 0.98, 7, 4)])
    for arm in CHAINS:
        steps = arm.num_steps
        assert known.length(arm) == pytest.approx((length(0.5, steps) + length(0.98, steps)) / 2, rel=0.05), arm


def test_a_deeper_chain_is_not_judged_by_drafts_that_ended_too_soon() -> None:
    """The censored ones: all that a chain of one step can say is that its draft was accepted."""
    known = fed(ONE, 1.0)
    assert known.length(SEVEN) > 7


def test_a_tree_follows_what_chains_learn_of_another_drafter() -> None:
    random = Random(2)
    known = fed(TREE, 0.9)
    before = known.length(TREE)
    known.weights_changed()
    for _ in range(40):
        known.see(THREE, accepted(random, 0.4, 3))
    assert known.length(TREE) < 0.8 * before


def test_an_explored_chain_tells_a_high_ratio_from_a_high_level() -> None:
    random = Random(3)
    known = fed(TREE, 0.95)
    expected = [known.length(arm) for arm in (TREE, SEVEN)]
    for _ in range(5):
        known.see(SEVEN, accepted(random, 0.5, 7))
        for _ in range(20):
            known.see(TREE, accepted(random, 0.95, 5))
    assert known.length(TREE) == pytest.approx(expected[0], rel=0.1)
    assert known.length(SEVEN) < 0.75 * expected[1]


def test_what_changes_unannounced_is_noticed() -> None:
    random = Random(4)
    known = fed(SEVEN, 0.9)
    for _ in range(30):
        known.see(SEVEN, accepted(random, 0.4, 7))
    assert known.length(SEVEN) == pytest.approx(length(0.4, 7), rel=0.2)


def test_off_gives_one_token_and_tells_nothing() -> None:
    known = fed(THREE, 0.8)
    known.learn()
    before = known.length(SEVEN)
    for _ in range(1000):
        known.see(None, [0] * 8)
    assert (known.length(None), known.length(SEVEN)) == (1.0, before)


@given(
    st.lists(
        st.tuples(st.sampled_from([*CHAINS, TREE, None]), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
        max_size=200,
    ),
    st.sets(st.integers(0, 200)),
)
def test_a_length_lies_between_one_and_the_whole_draft(
    steps: list[tuple[Arm | None, list[int]]], swaps: set[int]
) -> None:
    known = Acceptance()
    for number, (arm, found) in enumerate(steps):
        if number in swaps:
            known.weights_changed()
        known.see(arm, [min(each, arm.num_steps if arm else 0) for each in found])
        for each in (*CHAINS, TREE):
            assert 1 <= known.length(each) <= each.num_steps + 1
