"""Results find the step that they belong to, and its time, though some are lost and some were never launched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategy.kit import DEEP, SHALLOW
from tlt_server.strategy.pulls import UNDER_WAY, Pull, UnderWay


def test_under_overlap_a_step_lasts_from_the_result_before_to_its_own() -> None:
    steps = UnderWay()
    steps.launch(Pull(DEEP, 4, 0, launched=0.0))
    steps.launch(Pull(SHALLOW, 4, 0, launched=0.1))
    first, second = steps.settle(4, 1.0), steps.settle(4, 1.75)
    assert first is not None
    assert second is not None
    assert [(found[0].arm, found[1]) for found in (first, second)] == [(DEEP, 1.0), (SHALLOW, 0.75)]


def test_waiting_for_requests_is_nobodys_time() -> None:
    steps = UnderWay()
    steps.launch(Pull(DEEP, 4, 0, launched=0.0))
    steps.settle(4, 1.0)
    steps.launch(Pull(DEEP, 4, 0, launched=60.0))
    found = steps.settle(4, 60.5)
    assert found is not None
    assert found[1] == 0.5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_break_takes_the_time_of_the_steps_beside_it(overlap: bool) -> None:
    """Of the one before too, under overlap, where its result waits for the launch of what comes between."""
    steps = UnderWay()
    steps.launch(Pull(DEEP, 4, 0, launched=0.0))
    before = None if overlap else steps.settle(4, 1.0)
    steps.interrupt()
    steps.interrupt()
    steps.launch(Pull(SHALLOW, 5, 0, launched=1.1))
    before = before or steps.settle(4, 2.0)
    steps.launch(Pull(DEEP, 6, 0, launched=2.1))
    after, next_one = steps.settle(5, 3.0), steps.settle(6, 3.5)
    assert before is not None
    assert after is not None
    assert next_one is not None
    assert (before[1], after[0].arm, after[1], next_one[1]) == (None if overlap else 1.0, SHALLOW, None, 0.5)


@pytest.mark.parametrize(("batch", "most_accepted"), [(5, 0), (4, DEEP.path)])
def test_a_result_that_no_step_can_have_changes_nothing(batch: int, most_accepted: int) -> None:
    steps = UnderWay()
    steps.launch(Pull(DEEP, 4, 0, launched=0.0))
    assert steps.settle(batch, 0.5, most_accepted) is None
    found = steps.settle(4, 1.0)
    assert found is not None
    assert (found[0].arm, found[1], steps.unmatched, steps.lost) == (DEEP, None, 1, 0)


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["settled", "lost", "extra", "break"])), max_size=60))
def test_lost_and_extra_results_are_counted_and_soon_forgotten(steps: list[tuple[int, str]]) -> None:
    """Launch by launch, each result one step late; afterwards, the steps of a calm stretch are matched one by one."""
    under_way = UnderWay()
    launched = settled = 0
    now = 0.0
    before: tuple[int, str] | None = None
    for step in [*steps, *[(7, "settled")] * 4]:
        now += 1
        if step[1] == "break":
            under_way.interrupt()
        under_way.launch(Pull(DEEP, step[0], 0, now))
        launched += 1
        if before is not None and before[1] != "lost":
            settled += under_way.settle(before[0], now + 0.5) is not None
        if before is not None and before[1] == "extra":
            settled += under_way.settle(before[0], now + 0.6) is not None
        before = step
    last = under_way.settle(7, now + 1.5)
    assert last is not None
    assert last[0].launched == now
    assert last[1] == 1.0
    assert launched == settled + 1 + under_way.lost
    assert len(under_way._pulls) == 0


def test_a_server_that_never_answers_does_not_fill_the_memory() -> None:
    under_way = UnderWay()
    for number in range(1000):
        under_way.launch(Pull(DEEP, 1 + number % 5, 0, float(number)))
        under_way.interrupt()
    assert len(under_way._pulls) <= 2 * UNDER_WAY + 1
    assert under_way.lost == 1000 - UNDER_WAY
