"""Which arms are captured, at which sizes, where memory is bounded."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.graph_budget import Sizes, estimated, fitted, row_bytes

ARMS = (Arm(1, 1, 2), Arm(3, 1, 4), Arm(7, 1, 8), Arm(5, 4, 16), Arm(5, 4, 8), Arm(8, 4, 32))
EVERY = (1, 2, 4, 8, 16, 32, 64)
ROW = row_bytes(152064, 3584, 18944, 2)  # Qwen2.5-7B in bfloat16
budgets = st.floats(0.05, 6).map(lambda gb: gb * 1e9)
wishes = st.dictionaries(
    st.sampled_from(ARMS), st.integers(1, len(EVERY)).map(lambda count: EVERY[:count]), min_size=1, max_size=5
)


def estimate(sizes: Sizes) -> float:
    return estimated(sizes, EVERY, ROW)


def fits(wanted: Mapping[Arm, Sequence[int]], budget: float) -> bool:
    return any(estimate({arm: sizes[:1]}) <= budget for arm, sizes in wanted.items())


@given(wishes, budgets)
def test_as_much_as_fits_and_no_more(wanted: dict[Arm, Sequence[int]], budget: float) -> None:
    if not fits(wanted, budget):
        with pytest.raises(ConfigError, match=r"no arm fits\. Give \d"):
            fitted(wanted, estimate, budget)
        return
    found = fitted(wanted, estimate, budget)
    assert estimate(found) <= budget
    for arm, sizes in wanted.items():
        has = found.get(arm, ())
        assert has == sizes[: len(has)]
        if len(has) < len(sizes):
            more = {**found, arm: sizes[: len(has) + 1]}
            assert estimate(more) > budget, "one size more had fitted"


@given(wishes)
def test_where_all_fits_nothing_is_left_out(wanted: dict[Arm, Sequence[int]]) -> None:
    assert fitted(wanted, estimate, estimate(wanted)) == wanted


@given(wishes, budgets, st.data())
def test_what_is_captured_stays(wanted: dict[Arm, Sequence[int]], budget: float, data: st.DataObject) -> None:
    """The second look, when some arms were captured, and took more or less than was thought."""
    if not fits(wanted, budget):
        return
    first = fitted(wanted, estimate, budget)
    done = {arm: first[arm] for arm in data.draw(st.lists(st.sampled_from(sorted(first, key=str)), min_size=1))}
    again = fitted(first, estimate, budget * data.draw(st.floats(0.5, 1.5)), done)
    for arm, sizes in again.items():
        assert sizes == first[arm][: len(sizes)]
    assert all(again[arm] == sizes for arm, sizes in done.items())


@given(wishes, st.sampled_from(ARMS))
def test_more_takes_more(wanted: dict[Arm, Sequence[int]], arm: Arm) -> None:
    fewer = {each: sizes for each, sizes in wanted.items() if each != arm}
    assert estimate(fewer) <= estimate(wanted) <= estimate({**wanted, arm: EVERY})


def test_arms_that_share_passes_take_less() -> None:
    """Trees of one depth have one draft-extend, and what verifies as many tokens has one verification."""
    apart = [estimate({arm: EVERY[:3]}) - estimate({}) for arm in (Arm(5, 4, 16), Arm(5, 4, 8))]
    assert estimate({Arm(5, 4, 16): EVERY[:3], Arm(5, 4, 8): EVERY[:3]}) - estimate({}) < sum(apart)


def test_small_batches_come_first() -> None:
    """There speculation gains most, and a tree at a large one would take all there is."""
    wanted = {Arm(3, 1, 4): EVERY, Arm(8, 4, 32): EVERY}
    found = fitted(wanted, estimate, estimate({}) + 0.5e9)
    assert set(found) == set(wanted)
    assert len(found[Arm(8, 4, 32)]) < len(EVERY)
    assert max(found[Arm(3, 1, 4)]) >= max(found[Arm(8, 4, 32)])
