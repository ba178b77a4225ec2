"""Packing loses nothing, mixes nothing up, and stays within its limit."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tlt_grpo.learning.batches import Trajectory, packs, shares

Tokens = st.lists(st.integers(1, 99), min_size=1, max_size=9).map(tuple)
Trajectories = st.lists(
    st.builds(
        lambda prompt, response, advantage: Trajectory(prompt, response, tuple(-t / 100 for t in response), advantage),
        Tokens,
        Tokens,
        st.floats(-2, 2, width=32),
    ),
    min_size=1,
    max_size=20,
)


@given(Trajectories, st.integers(1, 60))
def test_every_trajectory_is_in_one_pack_as_it_is(given_: list[Trajectory], limit: int) -> None:
    found = []
    for pack in packs(given_, limit, "cpu"):
        tokens, positions = pack.tokens[0].tolist(), pack.positions[0].tolist()
        assert sum(pack.lengths) == len(tokens) == len(positions)
        assert len(pack.lengths) == 1 or len(tokens) <= limit
        assert positions == [place for length in pack.lengths for place in range(length)]
        begin = 0
        for length in pack.lengths:
            inside = (pack.at >= begin) & (pack.at < begin + length)
            first = pack.at[inside][0].item()
            assert pack.at[inside].tolist() == list(range(first, begin + length))
            response = tuple(pack.following[inside].tolist())
            assert response[:-1] == tuple(tokens[first + 1 : begin + length])
            assert [round(each, 2) for each in pack.sampled[inside].tolist()] == [-t / 100 for t in response]
            (advantage,) = set(pack.advantages[inside].tolist())
            found.append((tuple(tokens[begin : first + 1]), response, advantage))
            begin += length
    assert Counter(found) == Counter((each.prompt, each.response, each.advantage) for each in given_)


@given(Trajectories, st.integers(1, 60))
def test_packs_are_full(given_: list[Trajectory], limit: int) -> None:
    """No two of them would fit into one."""
    sizes = sorted(sum(pack.lengths) for pack in packs(given_, limit, "cpu"))
    assert all(one + other > limit for one, other in pairwise(sizes))


@given(Trajectories, st.integers(1, 6), st.integers(0, 5).map(str))
def test_shares_are_even_and_the_same_for_the_same_seed(given_: list[Trajectory], parts: int, seed: str) -> None:
    divided = shares(given_, parts, seed)
    assert Counter(each for share in divided for each in share) == Counter(given_)
    sizes = [len(share) for share in divided]
    assert len(divided) == min(parts, len(given_))
    assert max(sizes) - min(sizes) <= 1
    assert divided == shares(given_, parts, seed)
