"""How often the watchdog is wrong, measured on recorded traffic; what a request says; when it tries again."""

import math
import random
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic import ARM, MOST, Request, Traffic, feed, modelled, one_of, recorded

from tlt_server.config import Watchfulness
from tlt_server.engine.weights import watchdog
from tlt_server.engine.weights.watchdog import FIRST_S, LEAST, LEAST_REQUESTS, LONGEST_S, SHIFTS, Sample, Watchdog

pytestmark = pytest.mark.slow

START = one_of(recorded()["start"])
RATE = 0.1


def dog_of(floor: float = 1.2, clock: object = lambda: 0.0) -> Watchdog:
    return Watchdog([ARM], Watchfulness.ARMED, floor, clock)


def alarms(passes: int, runs: int) -> int:
    """Of watches over recorded traffic of which just as much is left as is demanded."""
    dog, traffic = dog_of(), Traffic(0, 16, START)
    feed(dog, traffic, 8000)
    dog.hear("drafter")
    kept = (dog.describe().least - 1) / (sum(map(sum, recorded()["start"])) / sum(map(len, recorded()["start"])))

    def thinned(draw: random.Random) -> Request:
        return [sum(draw.random() < kept for _ in range(count)) for count in START(draw)]

    found = [feed(deepcopy(dog), Traffic(seed, 16, thinned), passes) for seed in range(runs)]
    return sum(finding is not None and finding["worse"] for finding in found)


def test_the_false_alarm_rate_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the level itself, at a rate that can be measured."""
    monkeypatch.setattr(watchdog, "ALARM", math.log(len(SHIFTS) / RATE))
    monkeypatch.setattr(watchdog, "PASS", math.inf)
    runs = 200
    assert alarms(3000, runs) <= RATE * runs


def test_there_is_hardly_ever_an_alarm_at_the_level() -> None:
    assert alarms(8000, 60) == 0


def sample(shares: list[float], requests: int) -> Sample:
    made = Sample()
    for i, share in enumerate(shares):
        made.add(str(i % requests), round(share * MOST))
    return made


def test_what_a_baseline_needs() -> None:
    assert sample([1.0] * LEAST, LEAST_REQUESTS).enough()
    assert not sample([1.0] * (LEAST - 1), LEAST_REQUESTS).enough()
    assert not sample([1.0] * 10 * LEAST, LEAST_REQUESTS - 1).enough()


def test_requests_that_differ_are_less_sure() -> None:
    """Of the same counts: they say less where each request has but one of them."""
    counts = [0.0, 1 / 3, 2 / 3, 1.0] * 512
    apart, together = sample(counts, 511), sample(counts, 4)
    (sure, _), (unsure, between) = apart.estimate(MOST), together.estimate(MOST)
    assert 1.35 < sure < 1.5
    assert unsure < 0.1
    assert between > 1


def test_one_request_alone_counts_for_less() -> None:
    def passes(requests: int) -> int:
        dog, n = dog_of(floor=2.0), 0
        dog.hear("drafter")
        while (finding := dog.observe(ARM, [(str(n % requests), 0)])) is None:
            n += 1
        assert finding["worse"]
        return n

    assert passes(1) > 3 * passes(1000)


@pytest.mark.parametrize("one", [START, modelled(0.6, 0.15)])
def test_a_lower_bound_is_one(one: object) -> None:
    """From 64 requests, below what a large sample has."""

    def drawn(count: int, seed: int) -> Sample:
        made, draw = Sample(), random.Random(seed)
        for i in range(count):
            for accepted in one(draw):
                made.add(str(i), accepted)
        return made

    mean = (drawn(500, 99).length() or 0) - 1
    assert all(drawn(64, seed).estimate(MOST)[0] < mean for seed in range(12))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_grows() -> None:
    clock = Clock()
    dog, waits = dog_of(clock=clock), []
    for _ in range(10):
        dog.hear("off", probe=True)
        at = dog.describe().probe_time
        assert at is not None
        waits.append(at - clock.now)
        assert dog.probe_due(1) is None
        clock.now = at
        assert dog.probe_due(1) == "it was off for a while"
        dog.hear("probe")
    assert waits == [min(FIRST_S * 2**i, LONGEST_S) for i in range(10)]


def test_another_target_is_tried_at_once() -> None:
    dog = dog_of(clock=Clock())
    for _ in range(5):
        dog.hear("off", probe=True)
    assert dog.probe_due(4) is None
    assert dog.probe_due(5) == "the target is now version 5"
    dog.hear("probe")
    dog.hear("off", probe=True)
    assert dog.describe().probe_time == FIRST_S


@given(st.lists(st.sampled_from(["off", "probe", "drafter", "rollback", "wait", "publish"])))
def test_it_is_due_only_after_a_failure(happened: list[str]) -> None:
    clock, target, off = Clock(), 0, False
    dog = dog_of(clock=clock)
    for what in happened:
        if what == "wait":
            clock.now += FIRST_S
        elif what == "publish":
            target += 1
        else:
            dog.hear(what, probe=what == "off")
            off = what == "off"
        at = dog.describe().probe_time
        assert off == (at is not None)
        if dog.probe_due(target) is not None:
            assert off
        if at is not None:
            assert at <= clock.now + LONGEST_S
