"""How fast steps are, against what timing said: what moves all arms, and what is an arm's own."""

from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategy.kit import DEEP, SHALLOW, TREE
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts, Timing
from tlt_server.strategy.estimates import Estimates

ARMS: tuple[Choice, ...] = (DEEP, SHALLOW, TREE, None)


class Machine:
    """Its steps take so many times as long as timing said, and scatter by 3 %."""

    def __init__(self, seed: int) -> None:
        self.estimates = Estimates(StepCosts(Timing(arm, 1, 0, 1.0) for arm in ARMS))
        self.ratios = {DEEP: 1.0, SHALLOW: 1.0, TREE: 1.0, None: 1.0}
        self._random = Random(seed)

    def steps(self, arm: Choice, count: int) -> None:
        for _ in range(count):
            self.step(arm, self.ratios[arm] * exp(self._random.gauss(0, 0.03)))

    def step(self, arm: Choice, ratio: float) -> None:
        self.estimates.observe(arm, [0], self.estimates.seconds(arm, 1, 0), ratio)

    def known(self, arm: Choice) -> float:
        self.estimates.learn()
        return self.estimates.seconds(arm, 1, 0)

    def slow_down(self, factor: float) -> None:
        self.ratios = {arm: factor * ratio for arm, ratio in self.ratios.items()}


@given(st.floats(0.7, 1.4), st.integers(0, 9))
def test_an_arm_that_decodes_is_known(ratio: float, seed: int) -> None:
    machine = Machine(seed)
    machine.ratios[DEEP] = ratio
    machine.steps(DEEP, 60)
    assert machine.known(DEEP) == pytest.approx(ratio, rel=0.05)


@given(st.floats(0.8, 1.3), st.floats(0.8, 1.3), st.integers(0, 9))
def test_an_idle_arm_is_judged_beside_the_one_that_decodes(own: float, later: float, seed: int) -> None:
    """It was explored a few times, before all arms became slower or faster, and once since: whether all did, or the one
    that decodes alone, is told by a step of another one."""
    machine = Machine(seed)
    machine.ratios[SHALLOW] = own
    for _ in range(8):
        machine.steps(DEEP, 30)
        machine.steps(SHALLOW, 1)
    machine.slow_down(later)
    machine.steps(DEEP, 60)
    machine.steps(SHALLOW, 1)
    machine.steps(DEEP, 12)
    beside = machine.known(SHALLOW) / machine.known(DEEP)
    assert beside == pytest.approx(own, rel=0.08)
    assert machine.known(SHALLOW) == pytest.approx(own * later, rel=0.09)


@given(st.floats(1.6, 20.0), st.integers(0, 9))
def test_two_steps_that_waited_for_something_else_say_little(factor: float, seed: int) -> None:
    machine = Machine(seed)
    machine.steps(DEEP, 60)
    for _ in range(2):
        machine.step(DEEP, factor)
    machine.steps(DEEP, 10)
    for arm in ARMS:
        assert machine.known(arm) == pytest.approx(1.0, rel=0.08)


@given(st.floats(1.6, 10.0), st.integers(0, 9))
def test_whether_an_arm_became_slow_or_the_machine_the_next_arm_tells(factor: float, seed: int) -> None:
    for machine_is_slow in (False, True):
        machine = Machine(seed)
        machine.steps(SHALLOW, 60)
        machine.steps(DEEP, 60)
        if machine_is_slow:
            machine.slow_down(factor)
        else:
            machine.ratios[DEEP] = factor
        machine.steps(DEEP, 60)
        machine.steps(SHALLOW, 8)
        for arm in (SHALLOW, DEEP):
            assert machine.known(arm) == pytest.approx(machine.ratios[arm], rel=0.15), (arm, machine_is_slow)


@given(st.floats(1.6, 3.0), st.integers(4, 10), st.integers(0, 9))
def test_a_burst_is_not_held_against_the_arm_that_met_it(factor: float, steps: int, seed: int) -> None:
    machine = Machine(seed)
    machine.steps(SHALLOW, 60)
    machine.steps(DEEP, 60)
    machine.slow_down(factor)
    machine.steps(DEEP, steps)
    assert machine.known(DEEP) / machine.known(SHALLOW) == pytest.approx(1.0, rel=0.15)


@given(st.sampled_from([0.3, 0.5, 2.0, 3.0]), st.integers(0, 9))
def test_an_idle_arm_that_has_changed_is_believed_after_three_exploration_steps(factor: float, seed: int) -> None:
    machine = Machine(seed)
    for _ in range(10):
        machine.steps(DEEP, 20)
        machine.steps(SHALLOW, 1)
    machine.ratios[SHALLOW] = factor
    for _ in range(3):
        machine.steps(DEEP, 20)
        machine.steps(SHALLOW, 1)
    assert machine.known(SHALLOW) == pytest.approx(factor, rel=0.15)
    assert machine.known(DEEP) == pytest.approx(1.0, rel=0.06)


@given(st.lists(st.tuples(st.sampled_from(ARMS), st.floats(1e-3, 1e3)), max_size=80))
def test_what_is_known_is_finite(steps: list[tuple[Choice, float]]) -> None:
    machine = Machine(0)
    for arm, ratio in steps:
        machine.step(arm, ratio)
    assert all(abs(log(machine.known(arm))) < 2 * log(1e3) for arm in ARMS)
