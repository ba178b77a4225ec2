"""What a draft is worth: learned from what came after it, however it was come by."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tlt_server.history.calibration import FIRST, Calibration
from tlt_server.history.index import CLASSES, LOOKS, Judged

COUNTS = st.lists(st.integers(0, 1000), min_size=20, max_size=20)


NO_LOOKS = np.zeros(LOOKS)


def judged(tried: int, came: int) -> Judged:
    """In every class."""
    return Judged(np.array([np.full(CLASSES, tried), np.full(CLASSES, came)]), NO_LOOKS)


def looks(hoped: np.ndarray, came: np.ndarray) -> Judged:
    """As many."""
    sums = [len(hoped), hoped.sum(), came.sum(), (hoped * hoped).sum(), (hoped * came).sum()]
    return Judged(judged(0, 0).tokens, np.array(sums))


@given(st.lists(st.tuples(COUNTS, COUNTS), max_size=6))
def test_rates_are_rates(steps: list[tuple[list[int], list[int]]]) -> None:
    calibration = Calibration()
    for ones, others in steps:
        pairs = np.sort([ones, others], axis=0)[::-1].reshape(2, *CLASSES)
        calibration.learn(Judged(pairs, NO_LOOKS))
        assert ((calibration.rates > 0) & (calibration.rates < 1 + 1e-9)).all()


def test_a_rate_is_found() -> None:
    draw, calibration = np.random.default_rng(0), Calibration()
    for _ in range(400):
        calibration.learn(judged(8, int((draw.random(8) < 0.7).sum())))
    assert calibration.rates == pytest.approx(np.full(CLASSES, 0.7), abs=0.05)


def test_it_follows_what_changes() -> None:
    calibration = Calibration()
    for came in (4, 0):
        for _ in range(1000):
            calibration.learn(judged(4, came))
        assert calibration.rates == pytest.approx(np.full(CLASSES, came / 4), abs=0.05)


def test_nothing_came_yet() -> None:
    calibration = Calibration()
    assert (calibration.rates == FIRST).all()
    calibration.learn(judged(0, 0))
    assert calibration.rates == pytest.approx(FIRST)


PROMISED = np.array([0.9, 1.7, 2.4, 3.0])


def test_lengths_are_as_promised_until_something_came() -> None:
    assert Calibration().corrected(PROMISED) is PROMISED


@pytest.mark.parametrize("slope", [0.0, 0.4, 1.0])
def test_of_what_a_look_promises_beyond_the_mean_as_much_is_believed_as_came(slope: float) -> None:
    """At slope 0 lookups promise this and that, and what comes is the same: the best of them is no better."""
    draw, calibration = np.random.default_rng(0), Calibration()
    for _ in range(300):
        hoped = draw.uniform(1, 7, 8)
        calibration.learn(looks(hoped, 3 + slope * (hoped - 4) + draw.normal(0, 1, 8)))
    for whole in (2.0, 4.0, 6.0):
        found = calibration.corrected(PROMISED / PROMISED[-1] * whole)
        assert found[-1] == pytest.approx(min(3 + slope * (whole - 4), len(PROMISED)), abs=0.4)
        assert (np.diff(found) >= 0).all()


@given(st.lists(st.tuples(st.floats(0, 15), st.integers(0, 15)), min_size=1, max_size=30), st.floats(0, 4))
@example([(1.0, 5)], 2.0**-1022)
def test_no_more_comes_than_is_drafted_and_no_less_than_nothing(pairs: list[tuple[float, int]], whole: float) -> None:
    calibration = Calibration()
    calibration.learn(looks(*np.array(pairs, float).T))
    found = calibration.corrected(PROMISED / PROMISED[-1] * whole)
    assert (found >= 0).all()
    assert (found <= np.arange(1, 5)).all()
