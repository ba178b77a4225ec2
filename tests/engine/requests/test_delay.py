"""When prefills wait for each other. Time counts in steps; a prefill takes one."""

from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.requests.delay import PrefillDelay, delay_prefills

MOST = 32
SLOTS = 64


def lost(arrivals: list[int], running: int, most: int = MOST) -> tuple[int, list[int]]:
    """What a schedule loses, in steps summed over requests: those that wait, and those that a prefill stops; and how
    long each has waited. arrivals: how many arrive before each step."""
    queue: list[int] = []
    delay = PrefillDelay(SimpleNamespace(waiting_queue=queue), most)
    stopped, waits = 0, list[int]()
    for step, count in enumerate([*arrivals, *[0] * (most + 1)]):
        queue += [step] * count
        if queue and not delay.should_delay(running_bs=running, num_allocatable_reqs=SLOTS):
            stopped += running
            waits += [step - since for since in queue]
            queue.clear()
    assert not queue, "a request that arrived was never prefilled"
    return stopped + sum(waits), waits


def least(arrivals: list[int], running: int) -> int:
    """What one would lose who knew all arrivals: by the best times of prefills, found by dynamic programming."""
    best = [0]
    for end in range(1, len(arrivals) + 1):
        costs = []
        for begin in range(end):
            waited = sum(arrivals[step] * (end - 1 - step) for step in range(begin, end))
            some = any(arrivals[begin:end])
            costs.append(best[begin] + (running + waited if some else 0))
        best.append(min(costs))
    return best[-1]


@given(
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    running=st.integers(1, MOST - 1),
)
def test_at_most_twice_of_what_must_be_lost(arrivals: list[int], running: int) -> None:
    assert lost(arrivals, running)[0] <= 2 * least(arrivals, running) + running


@given(arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=100), running=st.integers(1, 10_000))
def test_none_waits_longer_than_it_may(arrivals: list[int], running: int) -> None:
    assert max(lost(arrivals, running)[1], default=0) <= MOST


@pytest.mark.parametrize("running", [64, 128, 256])
def test_steady_arrivals_lose_about_the_least(running: int) -> None:
    """The best period of arrivals at a steady rate loses the square root of twice running times rate, a step."""
    random, steps, rate = Random(0), 4000, 1.0
    arrivals = [sum(random.random() < rate / 4 for _ in range(4)) for _ in range(steps)]
    assert lost(arrivals, running)[0] / steps <= 1.1 * (2 * running * rate) ** 0.5
    at_once = sum(map(bool, arrivals)) * running
    assert lost(arrivals, running)[0] < at_once / 3


def test_nothing_waits_where_nothing_runs_or_nothing_fits() -> None:
    delay = PrefillDelay(SimpleNamespace(waiting_queue=[0]), MOST)
    assert not delay.should_delay(running_bs=0, num_allocatable_reqs=SLOTS)
    assert not delay.should_delay(running_bs=SLOTS, num_allocatable_reqs=0)


def test_requests_that_find_no_slot_count_for_nothing() -> None:
    """A queue behind a full server does not make each of its prefills a small one."""
    delay = PrefillDelay(SimpleNamespace(waiting_queue=[0] * 1000), MOST)
    assert delay.should_delay(running_bs=SLOTS - 1, num_allocatable_reqs=1)


def test_what_the_user_chose_stays() -> None:
    theirs = object()
    scheduler = SimpleNamespace(min_free_slots_delayer=theirs, waiting_queue=[])
    delay_prefills(scheduler, MOST)
    assert scheduler.min_free_slots_delayer is theirs
    scheduler = SimpleNamespace(min_free_slots_delayer=None, waiting_queue=[])
    delay_prefills(scheduler, 0)
    assert scheduler.min_free_slots_delayer is None
