"""Packing loses nothing, mixes nothing up, and stays within its limit."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tlt_grpo.batches import Trajectory, batches, shares

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
def test_every_trajectory_is_in_one_batch_as_it_is(given_: list[Trajectory], limit: int) -> None:
    found = []
    for batch in batches(given_, limit, "cpu"):
        assert len(batch.tokens) == 1 or batch.tokens.numel() <= limit
        assert batch.tokens.shape[1] == batch.old.shape[1] + 1 == batch.counts.shape[1] + 1
        for tokens, old, counts, advantage in zip(*batch, strict=True):
            (places,) = counts.nonzero(as_tuple=True)
            first, last = places[0].item(), places[-1].item()
            assert len(places) == last - first + 1
            assert not tokens[last + 2 :].any()
            assert not old[~counts].any()
            response = tuple(tokens[first + 1 : last + 2].tolist())
            assert [round(each, 2) for each in old[counts].tolist()] == [-t / 100 for t in response]
            found.append((tuple(tokens[: first + 1].tolist()), response, advantage.item()))
    assert Counter(found) == Counter((each.prompt, each.response, each.advantage) for each in given_)


@given(Trajectories, st.integers(1, 6), st.integers(0, 5).map(str))
def test_shares_are_even_and_the_same_for_the_same_seed(given_: list[Trajectory], parts: int, seed: str) -> None:
    divided = shares(given_, parts, seed)
    assert Counter(each for share in divided for each in share) == Counter(given_)
    sizes = [len(share) for share in divided]
    assert len(divided) == min(parts, len(given_))
    assert max(sizes) - min(sizes) <= 1
    assert divided == shares(given_, parts, seed)
