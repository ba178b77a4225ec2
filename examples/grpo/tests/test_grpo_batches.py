"""Packing loses nothing, mixes nothing up, and stays within its limit."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tlt_client import FinishReason, Rollout, TargetSpan

from tlt_grpo.errors import GrpoError
from tlt_grpo.learning.batches import Trajectory, packs, shares
from tlt_grpo.rollouts import ages

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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 9))
def test_tokens_that_are_too_old_are_read_and_not_learnt_from(old: list[int], most: int) -> None:
    size = len(old)
    new = Trajectory((1,), (2,) * size, (0.0,) * size, 1.5)
    (made,) = packs([new, new._replace(ages=tuple(old))], 99, "cpu", most)
    assert made.advantages.tolist() == [1.5] * size + [1.5 if age <= most else 0.0 for age in old]
    assert made.fresh.tolist() == [True] * size + [not any(old)] * size


def rollout(*spans: TargetSpan) -> Rollout:
    return Rollout(
        rid="", tokens=(1,) * 5, text="", logprobs=None, finish_reason=FinishReason("stop"), prompt_tokens=1,
        completion_tokens=5, weight_versions=spans,
    )  # fmt: skip


def test_the_server_says_how_old_a_token_is() -> None:
    assert ages(rollout(TargetSpan(0, 2, "3"), TargetSpan(2, 5, "5")), 6) == (3, 3, 1, 1, 1)
    with pytest.raises(GrpoError, match="does not say which weights"):
        ages(rollout(), 6)
    with pytest.raises(GrpoError, match="weights 'default' have sampled"):
        ages(rollout(TargetSpan(0, 5, "default")), 6)
