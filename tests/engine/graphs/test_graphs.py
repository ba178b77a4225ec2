"""Which batch sizes an arm is captured at, and on what stream."""

from hypothesis import given
from hypothesis import strategies as st

from tlt_server.config import Arm
from tlt_server.engine.graphs.capture import MOST_VERIFIED, capture_stream, sizes_of
from tlt_server.engine.graphs.memory import told

SIZES = st.lists(st.integers(1, 512), min_size=1, unique=True).map(sorted)
ARMS = st.sampled_from([Arm(1, 1, 2), Arm(3, 1, 4), Arm(5, 4, 16), Arm(8, 4, 48)])


@given(ARMS, SIZES)
def test_an_arm_is_captured_where_it_can_pay(arm: Arm, sizes: list[int]) -> None:
    found = sizes_of(arm, sizes)
    assert found == sizes[: len(found)] != []
    assert all(size * arm.num_draft_tokens <= MOST_VERIFIED for size in found[1:])
    assert all(size * arm.num_draft_tokens > MOST_VERIFIED for size in sizes[len(found) :])


def test_there_is_one_stream_to_capture_on() -> None:
    assert capture_stream() is capture_stream()


def test_what_was_captured_is_told_in_a_line() -> None:
    chain, tree, wide = Arm(3, 1, 4), Arm(5, 4, 16), Arm(8, 4, 32)
    wanted = {chain: (1, 2, 4), tree: (1, 2), wide: (1,)}
    assert (
        told(wanted, wanted, 1.5, None)
        == "CUDA graphs take 1.50 GB: (3,1,4) up to 4; (5,4,16) up to 2; (8,4,32) up to 1"
    )
    line = told(wanted, {chain: (1, 2, 4), tree: (1,)}, 0.9, 1.0)
    assert line == "CUDA graphs take 0.90 GB of 1.00: (3,1,4) up to 4; (5,4,16) up to 1, not 2; left out: (8,4,32)"
    assert told(wanted, wanted, 1.2, 1.0).endswith("More than the budget, which reckons with estimates")
