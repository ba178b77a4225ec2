"""The watchdog is quiet over drafters that are as good, and never over one that is useless, on recorded traffic."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic import ARM, MOST, Request, Traffic, feed, modelled, one_of, recorded

from tlt_server.config import Watchfulness
from tlt_server.engine.weights.watchdog import GRACE, Watchdog

RECORDED = {drafter: one_of(requests) for drafter, requests in recorded().items()}
FLOOR = 1.2
ENOUGH = 4000
"""Passes; a baseline of 500 stretches."""
LONG = 40_000
"""Passes, after which a watch has long ended."""


def dog_of(floor: float = FLOOR) -> Watchdog:
    return Watchdog([ARM], Watchfulness.ARMED, floor, lambda: 0.0)


def settled(seed: int, batch: int, drafter: Callable[[random.Random], Request]) -> tuple[Watchdog, Traffic]:
    dog, traffic = dog_of(), Traffic(seed, batch, drafter)
    assert feed(dog, traffic, ENOUGH) is None
    assert dog.describe().state == "settled"
    return dog, traffic


def swapped(seed: int, batch: int, before: str, after: str) -> dict[str, Any] | None:
    dog, traffic = settled(seed, batch, RECORDED[before])
    dog.hear("drafter")
    traffic.swap(RECORDED[after])
    return feed(dog, traffic, LONG)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("after", ["start", "noise 0.005", "noise 0.1"])
def test_a_drafter_as_good_stays(after: str, batch: int, seed: int) -> None:
    """With the dip of the swap, which the recordings hold: requests went on with the KV of the drafter before. Noise of
    a tenth costs 2 % of the accepted drafts."""
    finding = swapped(seed, batch, "start", after)
    assert finding is not None
    assert not finding["worse"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(
    ("after", "passes"), [("random", 250), ("noise 0.8", 250), ("noise 0.4", 320), ("noise 0.2", 6000)]
)
def test_a_drafter_that_is_worse_is_found(after: str, passes: int, batch: int, seed: int) -> None:
    """They have lost 97, 93, 68 and 20 % of the accepted drafts."""
    finding = swapped(seed, batch, "start", after)
    assert finding is not None
    assert finding["worse"]
    assert finding["steps"] <= GRACE + passes / batch
    assert finding["accept_length"] < finding["least"] < 3.57
    assert finding["before"] == pytest.approx(3.57, abs=0.1)
    assert finding["under_floor"] == (after in ("random", "noise 0.8") and finding["accept_length"] < FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_requests_that_differ_much(batch: int, seed: int) -> None:
    """One of them alone is no sample: what is as good stays, what is useless is found all the same."""
    for kept, worse in ((1.0, False), (0.95, False), (0.02, True)):
        dog, traffic = dog_of(), Traffic(seed, batch, modelled(0.6, 0.15))
        feed(dog, traffic, 16_000)
        dog.hear("drafter")
        traffic.swap(modelled(0.6, 0.15, kept))
        finding = feed(dog, traffic, LONG)
        assert finding is not None
        assert finding["worse"] == worse


def test_of_two_in_a_row_the_second_is_held_against_the_trusted_one() -> None:
    """A bad drafter makes no baseline, however often it is followed by another."""
    dog, traffic = settled(1, 16, RECORDED["start"])
    before = dog.describe().baseline
    traffic.swap(RECORDED["noise 0.2"])
    for _ in range(20):
        dog.hear("drafter")
        assert feed(dog, traffic, 200) is None
        assert not dog.trusted
    assert dog.describe().baseline == before
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert finding["worse"]
    assert not dog.trusted
    assert dog.describe().state == "worse"


def test_what_is_kept_is_the_baseline_of_the_next() -> None:
    dog, traffic = settled(2, 16, RECORDED["noise 0.2"])
    dog.hear("drafter")
    traffic.swap(RECORDED["start"])
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert not finding["worse"]
    assert dog.trusted
    assert dog.describe().state == "settled"
    dog.hear("drafter")
    traffic.swap(RECORDED["noise 0.2"])
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert finding["worse"]


def test_a_step_back_needs_no_watch() -> None:
    """And its baseline is its own."""
    dog, traffic = settled(3, 16, RECORDED["start"])
    before = dog.describe().baseline
    dog.hear("drafter")
    traffic.swap(RECORDED["random"])
    assert feed(dog, traffic, LONG) is not None
    dog.hear("rollback", trusted=True)
    watch = dog.describe()
    assert (watch.state, watch.event, watch.baseline, watch.before) == ("settled", "rollback", before, before)


def test_a_step_back_between_two_that_were_trusted_begins_anew() -> None:
    """What the one had says nothing of the other."""
    dog, _ = settled(3, 16, RECORDED["start"])
    dog.hear("rollback", trusted=True)
    assert dog.describe().state == "gathering"


def test_a_step_back_to_one_that_was_on_trial() -> None:
    dog, traffic = settled(3, 16, RECORDED["start"])
    dog.hear("drafter")
    dog.hear("rollback", trusted=False)
    traffic.swap(RECORDED["random"])
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert finding["worse"]


@pytest.mark.parametrize(("after", "worse"), [("noise 0.2", False), ("random", True)])
def test_another_target(after: str, worse: bool) -> None:
    """Loses some without a word; a collapse is told, and is how it is from then on."""
    dog, traffic = settled(4, 16, RECORDED["start"])
    dog.hear("target")
    traffic.swap(RECORDED[after])
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert (finding["worse"], finding["since"]) == (worse, "target")
    assert dog.trusted
    assert feed(dog, traffic, ENOUGH) is None
    assert dog.describe().baseline == pytest.approx(3.06 if after == "noise 0.2" else 1.07, abs=0.1)


def test_what_a_trusted_drafter_had_under_a_new_target_is_what_the_next_is_held_against() -> None:
    dog, traffic = settled(5, 16, RECORDED["start"])
    dog.hear("target")
    traffic.swap(RECORDED["noise 0.2"])
    feed(dog, traffic, LONG)
    dog.hear("drafter")
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert not finding["worse"]
    assert finding["before"] == pytest.approx(3.06, abs=0.1)


def test_a_target_and_a_drafter_at_once() -> None:
    """Held against what was before both, less strictly; if it goes, the one before is still unproven."""
    for after, worse in (("noise 0.2", False), ("random", True)):
        dog, traffic = settled(6, 16, RECORDED["start"])
        dog.hear("target")
        dog.hear("drafter")
        traffic.swap(RECORDED[after])
        finding = feed(dog, traffic, LONG)
        assert finding is not None
        assert (finding["worse"], finding["since"]) == (worse, "target and drafter")
    dog.hear("rollback", trusted=True)
    watch = dog.describe()
    assert (watch.state, watch.event) == ("watching", "rollback")
    assert watch.least == pytest.approx(1 + 0.5 * 2.5, abs=0.1)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_without_a_baseline_the_floor_alone_counts(batch: int) -> None:
    for drafter, worse in (("random", True), ("noise 0.4", False)):
        dog, traffic = dog_of(), Traffic(7, batch, RECORDED[drafter])
        assert dog.describe().state == "gathering"
        dog.hear("drafter")
        assert dog.describe().least == FLOOR
        finding = feed(dog, traffic, LONG)
        assert finding is not None
        assert finding["worse"] == worse
        assert finding["before"] is None


def test_off_sees_nothing_and_forgets() -> None:
    dog, traffic = settled(8, 16, RECORDED["start"])
    dog.hear("off")
    dog.hear("target")  # nothing is drafted: there is nothing to watch
    watch = dog.describe()
    assert (watch.state, watch.baseline, dog.trusted) == ("off", None, False)
    dog.hear("drafter")
    assert dog.describe().least == FLOOR
    assert feed(dog, traffic, LONG) is not None
    assert dog.trusted


def test_memory_that_comes_back_otherwise_is_found() -> None:
    dog, traffic = settled(9, 16, RECORDED["start"])
    dog.hear("memory")
    traffic.swap(RECORDED["random"])
    finding = feed(dog, traffic, LONG)
    assert finding is not None
    assert (finding["worse"], finding["since"]) == (True, "memory")


def test_the_steps_after_an_event_are_not_looked_at() -> None:
    dog, _ = settled(10, 16, RECORDED["start"])
    dog.hear("drafter")
    for i in range(GRACE):
        dog.observe(ARM, [(str(request), 0) for request in range(500)])
        assert dog.describe().steps == i + 1
    assert dog.describe().accept_length is None


STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(0, MOST)), max_size=8, unique_by=lambda each: each[0]
)
EVENTS = ["drafter", "target", "memory", "off", "probe", "trusted", "untrusted"]
WORDS = st.one_of(st.sampled_from(EVENTS), st.tuples(STEPS, st.integers(1, 300)))


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(WORDS, max_size=25), st.sampled_from([1.0001, 1.2, 3.9, 9.0]))
def test_it_never_fails_and_two_ranks_agree(words: list[object], floor: float) -> None:
    """Whatever their clocks say."""
    draw = random.Random(0)
    dogs = [Watchdog([ARM], Watchfulness.ARMED, floor, clock) for clock in (lambda: 0.0, draw.random)]
    for word in words:
        for dog in dogs:
            if word in ("trusted", "untrusted"):
                dog.hear("rollback", trusted=word == "trusted")
            elif isinstance(word, str):
                dog.hear(word)
        if isinstance(word, tuple):
            step, times = word
            for _ in range(times):
                findings = [dog.observe(ARM, step) for dog in dogs]
                assert len({each and str({**each, "seconds": 0.0}) for each in findings}) == 1
        told = [dog.describe() for dog in dogs]
        assert len({(each.state, each.event, each.accept_length, each.before, each.least) for each in told}) == 1
        assert dogs[0].trusted == dogs[1].trusted
