"""What a draft is worth: learned from what came after it, however it was come by."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.history.calibration import Calibration
from tlt_server.history.index import LENGTHS, Drafts, no_drafts

MOST = 7


def drafted(tokens: list[list[int]], chances: list[list[float]], matched: int = 16) -> Drafts:
    drafts = no_drafts(len(tokens), MOST)
    for row, each in enumerate(tokens):
        drafts.tokens[row, : len(each)] = each
        drafts.chances[row, : len(each)] = chances[row]
        drafts.lengths[row], drafts.matched[row] = len(each), matched if each else 0
    return drafts


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=MOST), st.lists(st.integers(0, 2), max_size=MOST + 2), st.floats(0.1, 1)
    ),
    min_size=1,
    max_size=5,
)


@given(st.lists(st.tuples(ROWS, st.sampled_from(LENGTHS)), max_size=6))
def test_what_is_expected_can_be(steps: list[tuple[list[tuple[list[int], list[int], float]], int]]) -> None:
    """Deeper drafts are expected to give no less, at most a token each, and nothing where nothing was found."""
    calibration = Calibration()
    for rows, matched in steps:
        chances = [[share ** (k + 1) for k in range(len(tokens))] for tokens, _, share in rows]
        drafts = drafted([tokens for tokens, _, _ in rows], chances, matched)
        lengths = [1.0, *calibration.lengths(drafts)]
        assert all(0 <= after - before <= 1 for before, after in pairwise(lengths))
        calibration.learn(drafts, [came for _, came, _ in rows])
        assert ((calibration.rates > 0) & (calibration.rates < 1 + 1e-9)).all()
    assert calibration.lengths(no_drafts(3, MOST)) == [1.0] * MOST


@pytest.mark.parametrize("known", [1, 2, MOST])
def test_a_rate_is_found_by_steps_of_any_length(known: int) -> None:
    """Of tokens of which each comes with probability 0.7, once those before it did."""
    draw, calibration = np.random.default_rng(0), Calibration()
    drafts = drafted([[1] * MOST] * 8, [[1.0] * MOST] * 8)
    for _ in range(400):
        came = (draw.random((8, known)) < 0.7).astype(int)
        calibration.learn(drafts, came.tolist())
    want = 1 + sum(0.7**k for k in range(1, MOST + 1))
    assert calibration.lengths(drafts)[-1] == pytest.approx(want, abs=0.25)


def test_it_follows_what_changes() -> None:
    calibration, drafts = Calibration(), drafted([[1] * MOST] * 4, [[1.0] * MOST] * 4)
    for came in (1, 2):
        for _ in range(1000):
            calibration.learn(drafts, [[came] * MOST] * 4)
        right = came == 1
        assert (calibration.lengths(drafts)[-1] > 7.5) == right
    assert calibration.lengths(drafts)[-1] < 1.1


def test_nothing_came_yet() -> None:
    calibration, drafts = Calibration(), drafted([[1, 2]], [[1.0, 0.5]])
    before = calibration.rates
    calibration.learn(drafts, [[]])
    calibration.learn(no_drafts(0, MOST), [])
    assert (calibration.rates == before).all()
