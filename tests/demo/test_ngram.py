"""Prompt lookup against cases worked out by hand, and against a search that keeps no index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.demo.ngram import prompt_lookup_accept_length

tokens = st.lists(st.integers(0, 3), min_size=2, max_size=30)


@pytest.mark.parametrize(
    ("prompt", "output", "accept_length"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 4.0),  # one pass: 2 3 4 proposed and right, then the bonus token
        ([1, 2, 3, 4], [9, 8, 7], 1.0),  # nothing to look up: a token each pass
        ([1, 2, 5, 1, 2, 6, 1], [2, 6, 1], 2.0),  # the latest 1 2 goes on with 6 1, the earlier one with 5
        ([1, 2, 3, 2, 7], [1, 2, 3, 2], 3.0),  # the only 1 before goes on with 2 3 2
        ([5, 5], [5, 5, 5], 2.0),  # only what is known can be proposed: one 5, then the bonus token
    ],
)
def test_by_hand(prompt: list[int], output: list[int], accept_length: float) -> None:
    assert prompt_lookup_accept_length([(prompt, output)]) == accept_length


def _search(prompt: list[int], output: list[int], max_ngram: int, drafts: int) -> tuple[int, int]:
    known, passes, whole = len(prompt) + 1, 0, prompt + output
    while known < len(whole):
        draft: list[int] = []
        for n in range(min(max_ngram, known), 0, -1):
            ends = [end for end in range(n, known) if whole[end - n : end] == whole[known - n : known]]
            if ends:
                draft = whole[max(ends) : known][:drafts]
                break
        known += 1 + next(
            (i for i, token in enumerate(draft) if whole[known + i : known + i + 1] != [token]), len(draft)
        )
        passes += 1
    return len(output) - 1, passes


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_equals_a_plain_search(rollouts: list[tuple[list[int], list[int]]], max_ngram: int, drafts: int) -> None:
    counts = [_search(prompt, output, max_ngram, drafts) for prompt, output in rollouts]
    wanted = sum(count for count, _ in counts) / sum(passes for _, passes in counts)
    assert prompt_lookup_accept_length(rollouts, max_ngram, drafts) == pytest.approx(wanted)


def test_nothing_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="longer outputs"):
        prompt_lookup_accept_length([([1, 2], [3])])
