"""How fast training goes beside rollouts: by a server that decodes, and a GPU that gives both their turns, in a time
that the tests move."""

from math import exp, isfinite, sqrt
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tlt_server.trainer.spot import QUIET_EVERY_S, Pace

TICK_S = 0.01


class Scene:
    """A server that decodes all the time. cost: seconds of decoding that one of training takes. wrong: times as long as
    it expects that its steps take. scatter: of the times of 10 ms, as a share. drift: by which step times move, and the
    seconds that they do so within, for other work on the machine."""

    def __init__(
        self,
        budget: float,
        cost: float,
        wrong: float = 1.0,
        scatter: float = 0.0,
        seed: int = 0,
        drift: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.pace, self.cost, self.wrong, self.scatter = Pace(budget), cost, wrong, scatter
        self.random, self.now = Random(seed), 0.0
        self.decoded = self.expected = self.trained = self.progress = self.possible = self.drifted = 0.0
        self.drift, self.stays = drift[0], exp(-TICK_S / drift[1])
        self.told: list[tuple[float, float, float]] = []  # when, and what
        self.training = 0.0  # until then
        self.entries = 0  # of a step
        self.owed = 0.0

    def run(self, seconds: float, step_s: float = 0.1) -> float:
        """By how much decoding was slower for the training beside it."""
        before, possible, until = self.progress, self.possible, self.now + seconds
        while self.now < until:
            self.tick(step_s)
        return (self.possible - possible) / (self.progress - before) - 1

    def tick(self, step_s: float) -> None:
        busy = self.now < self.training
        moved = self.drift * sqrt(1 - self.stays**2) * self.random.gauss(0, 1)
        self.drifted = self.stays * self.drifted + moved
        alone = exp(-self.drifted)
        # what training costs beyond the time that it takes itself, decoding has lost soon after
        self.owed += self.cost * TICK_S * busy
        lost = min(self.owed, TICK_S)
        self.owed -= lost
        speed = alone * (1 - lost / TICK_S)
        self.now += TICK_S
        self.possible += alone * TICK_S
        self.progress += speed * TICK_S
        self.decoded += TICK_S
        self.expected += speed * TICK_S / self.wrong * (1 + self.random.gauss(0, self.scatter))
        if busy:
            self.trained += TICK_S
            if self.now >= self.training:
                self.pace.ended(self.now)
        elif not self.pace.rests(self.now):
            self.pace.began(self.now, self.entries)
            self.training = self.now + step_s
        if round(self.now / TICK_S) % 50 == 0:  # heard a little later than it was counted
            self.told.append((self.now + self.random.uniform(0, 0.15), self.decoded, self.expected))
        while self.told and self.told[0][0] <= self.now:
            _, decoded, expected = self.told.pop(0)
            self.pace.heard("one", decoded, expected, self.now)


@pytest.mark.parametrize("cost", [1.7, 1.0, 0.5, 0.2])
@pytest.mark.parametrize("wrong", [1.0, 1.3])
def test_decoding_is_slowed_down_by_the_budget_whatever_training_costs(cost: float, wrong: float) -> None:
    scene = Scene(0.03, cost, wrong)
    scene.run(60)
    trained, slower = scene.trained, scene.run(120)
    assert 0.02 < slower < 0.032
    assert scene.trained - trained > 0.02 / cost * 115
    assert scene.pace.slowdown == pytest.approx(slower, rel=0.3)


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 3)), max_size=30), st.booleans())
def test_whatever_a_server_says_training_goes_on_some_time(told: list[tuple[float, float, float]], grows: bool) -> None:
    pace, now, decoded, expected = Pace(0.05), 0.0, 0.0, 0.0
    for took, expects, seconds in told:
        decoded, expected = (decoded + took, expected + expects) if grows else (took, expects)
        pace.heard("one", decoded, expected, now := now + seconds)
        if not pace.rests(now):
            pace.began(now)
            pace.ended(now := now + 0.1)
    assert isfinite(pace.cost)
    assert pace.cost >= 0.05
    assert isfinite(pace.slowdown)
    assert not pace.rests(now + 1e16)


@pytest.mark.slow
@given(st.floats(0.1, 1.0), st.floats(0.01, 0.1), st.floats(0.02, 0.3), st.floats(0.7, 1.5), st.integers(0, 9))
@example(0.9921875, 0.04, 0.0234375, 0.703125, 1)  # whose steps were taken to be of the reports before and after
def test_the_budget_is_kept_though_times_scatter(
    cost: float, budget: float, step_s: float, wrong: float, seed: int
) -> None:
    scene = Scene(budget, cost, wrong, scatter=0.1, seed=seed)
    scene.run(30, step_s)
    assert scene.run(60, step_s) < 1.25 * budget + 0.003


@pytest.mark.parametrize("seed", range(6))
def test_a_noisy_machine_does_not_keep_training_from_its_budget(seed: int) -> None:
    """What else slows rollouts down may seem to be training's doing: more than its time it costs where that is sure."""
    scene = Scene(0.03, 1.0, scatter=0.8, seed=seed)
    scene.run(30)
    trained = scene.trained
    scene.run(60)
    assert (scene.trained - trained) / 60 > 0.025


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cost", [0.5, 0.15])
@pytest.mark.parametrize("drift", [(0.1, 3.0), (0.2, 1.0), (0.2, 10.0)])
def test_the_budget_is_kept_though_other_work_moves_step_times(
    drift: tuple[float, float], cost: float, seed: int
) -> None:
    """By more than training does, for seconds: what they happen to do beside training says little of what it costs. A
    step of 43 ms waits as long again for its turns."""
    scene = Scene(0.03, cost, seed=seed, drift=drift)
    scene.pace.began(-1.0, 4096)
    scene.pace.ended(-0.957)
    scene.entries = 4096
    assert scene.run(120, 0.086) < 0.035
    assert scene.trained > 120 * 0.02 / max(cost, 0.5)


def test_before_anything_is_measured_a_second_of_training_counts_as_one_of_decoding() -> None:
    pace = Pace(0.05)
    assert not pace.rests(0.0)
    pace.began(0.0)
    pace.ended(1.0)
    assert pace.rests(20.9)
    assert not pace.rests(21.1)


def test_a_first_step_that_compiles_does_not_keep_training_away() -> None:
    pace = Pace(0.05)
    pace.began(0.0, 100)
    pace.ended(20.0)
    assert not pace.rests(20.0)
    pace.began(20.0, 100)
    pace.ended(21.0)
    assert pace.rests(40.9)
    assert not pace.rests(41.1)


def test_a_first_step_that_compiles_says_nothing_of_what_training_costs() -> None:
    pace, now = Pace(0.03), 0.0
    for second in range(30):
        if second == 6:
            pace.began(now - 0.5, 100)
        if second == 26:
            pace.ended(now - 0.5)
        pace.heard("one", now, now, now)  # nothing is slower meanwhile
        now += 1.0
    assert pace.cost == 1.0


def test_a_step_that_waits_for_its_turns_costs_no_more_than_one_that_has_the_gpu_to_itself() -> None:
    pace = Pace(0.05)
    pace.began(0.0, 100)
    pace.ended(1.0)
    pace.began(21.5, 200)
    pace.ended(25.5)  # by itself it takes 2
    assert pace.rests(21.5 + 2 * 20.9)
    assert not pace.rests(21.5 + 2 * 21.1)


@pytest.mark.parametrize("turns", [2.0, 4.0])
def test_decoding_is_slowed_down_by_the_budget_where_steps_wait_for_turns(turns: float) -> None:
    """A GPU that gives training a half of the time, or a quarter: a step of 0.1 s takes 0.2 s, or 0.4."""
    scene = Scene(0.03, 1 / turns)
    scene.pace.began(-1.0, 100)
    scene.pace.ended(-0.9)
    scene.entries = 100
    slower = scene.run(10, 0.1 * turns)
    assert 0.015 < slower < 0.05
    assert 0.02 < scene.run(60, 0.1 * turns) < 0.032


def test_training_without_load_says_nothing_of_what_it_costs() -> None:
    """It goes as fast as it can then, and servers report nothing."""
    scene = Scene(0.03, 1.0)
    scene.run(30)
    cost = scene.pace.cost
    for _ in range(100):
        scene.pace.began(scene.now)
        scene.now += 0.1
        scene.pace.ended(scene.now)
    scene.pace.heard("one", scene.decoded, scene.expected, scene.now)
    scene.pace.heard("one", scene.decoded + 0.01, scene.expected + 0.01, scene.now + 0.1)
    assert scene.pace.cost == cost


def test_steps_beside_training_are_held_against_ones_without_it_that_are_not_old() -> None:
    scene = Scene(0.5, 0.1)  # it could train all the time
    scene.run(60, step_s=1.0)
    assert all(scene.now - each.quiet < QUIET_EVERY_S + 3 for each in scene.pace._servers.values())


def test_a_server_that_counts_anew_or_is_gone_is_not_compared_with_what_it_said() -> None:
    scene = Scene(0.03, 0.5)
    scene.run(30)
    assert scene.pace.cost < 0.8
    scene.pace.heard("one", 0.0, 0.0, scene.now)
    assert scene.pace.cost == 1.0
    scene.pace.forget("one")
    assert (scene.pace.cost, scene.pace.slowdown) == (1.0, 0.0)


def test_the_server_that_loses_most_counts() -> None:
    scene = Scene(0.03, 0.2)
    scene.run(60)
    assert scene.pace.cost < 0.4
    scene.pace.heard("two", 0.0, 0.0, scene.now)
    assert scene.pace.cost == 1.0
