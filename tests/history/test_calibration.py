"""What a draft is worth: learned from what came after it, however it was come by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.history.calibration import FIRST, Calibration
from tlt_server.history.index import CLASSES

COUNTS = st.lists(st.integers(0, 1000), min_size=20, max_size=20)


def judged(tried: int, came: int) -> np.ndarray:
    """In every class."""
    return np.array([np.full(CLASSES, tried), np.full(CLASSES, came)])


@given(st.lists(st.tuples(COUNTS, COUNTS), max_size=6))
def test_rates_are_rates(steps: list[tuple[list[int], list[int]]]) -> None:
    calibration = Calibration()
    for ones, others in steps:
        pairs = np.sort([ones, others], axis=0)[::-1].reshape(2, *CLASSES)
        calibration.learn(pairs)
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
