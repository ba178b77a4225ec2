"""The part of the target's vocabulary that a drafter proposes of: its most frequent tokens, by the active target."""

from array import array
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.weights.vocabulary import EVERY, DraftVocabulary

WHOLE, SIZE = 40, 8


def made(size: int = SIZE) -> DraftVocabulary:
    return DraftVocabulary(torch.nn.Parameter(torch.randn(WHOLE + 4, 3), requires_grad=False), WHOLE, size)


def said(vocabulary: DraftVocabulary, tokens: list[int]) -> None:
    """By one request, one a step."""
    vocabulary.sampled(np.array([tokens], np.int32), np.array([len(tokens)], np.int32))


def followed(vocabulary: DraftVocabulary) -> list[int]:
    """Its tokens, after as many steps as a choice takes."""
    for _ in range(EVERY):
        vocabulary.follow()
    tokens: list[int] = vocabulary.tokens.tolist()
    assert torch.equal(vocabulary.rows, vocabulary.head[vocabulary.tokens])
    return tokens


def test_it_begins_with_the_first_tokens() -> None:
    assert followed(made()) == list(range(SIZE))


@given(st.lists(st.lists(st.integers(0, WHOLE - 1), min_size=1, max_size=60), max_size=6), st.integers(1, WHOLE - 1))
def test_no_token_beyond_was_more_frequent_and_who_stays_stays_in_its_place(texts: list[list[int]], size: int) -> None:
    vocabulary, counts = made(size), np.zeros(WHOLE, int)
    before, had, missed = list(range(size)), set(range(size)), 0
    for text in texts:
        said(vocabulary, text)
        np.add.at(counts, text, 1)
        missed += sum(token not in had for token in text)
        tokens = followed(vocabulary)
        had = set(tokens)
        assert len(had) == size
        beyond = [counts[token] for token in range(WHOLE) if token not in had]
        assert min(counts[tokens]) >= max(beyond)
        assert all(new == old or old not in had for new, old in zip(tokens, before, strict=True))
        before = tokens
    seen = sum(map(len, texts))
    assert (vocabulary.counts["seen"], vocabulary.counts["missed"]) == (seen, missed)
    assert vocabulary.untold().total() == seen + missed
    assert not vocabulary.untold()


def test_of_a_step_only_what_counts() -> None:
    vocabulary = made()
    vocabulary.sampled(np.array([[30, 31, 32], [33, 34, 35]], np.int32), np.array([2, 1], np.int32))
    assert {30, 31, 33} < set(followed(vocabulary))
    assert vocabulary.counts["seen"] == 3


def read(vocabulary: DraftVocabulary, tokens: list[int], start: int, count: int) -> None:
    req = SimpleNamespace(full_untruncated_fill_ids=array("q", tokens))
    vocabulary.prompted(SimpleNamespace(reqs=[req], prefix_lens=[start], extend_lens=[count]))


def test_a_prompt_counts_as_far_as_it_is_read_and_an_image_in_it_does_not() -> None:
    vocabulary, prompt = made(), [20, 21, 22, 23, 1 << 40, -5]
    read(vocabulary, prompt, 1, 2)
    read(vocabulary, prompt, 3, 3)
    assert {21, 22, 23} < set(tokens := followed(vocabulary))
    assert 20 not in tokens
    assert not vocabulary.counts.total()


def test_what_a_prompt_brings_is_there_for_the_first_step() -> None:
    vocabulary = made()
    vocabulary.follow()
    read(vocabulary, [30, 31], 0, 2)
    vocabulary.follow()
    assert {30, 31} < set(vocabulary.tokens.tolist())


def test_no_prompt_drives_out_what_is_sampled() -> None:
    """However long it is: each of its tokens counts once."""
    vocabulary = made()
    for _ in range(2):
        said(vocabulary, list(range(20, 20 + SIZE)))
    read(vocabulary, [30, 31] * 10_000, 0, 20_000)
    assert set(followed(vocabulary)) == set(range(20, 20 + SIZE))


def test_rows_are_those_of_the_target_that_is_active() -> None:
    vocabulary, version = made(), 0
    vocabulary.version = lambda: version
    before = vocabulary.rows.clone()
    vocabulary.head.mul_(2)
    vocabulary.follow()
    assert torch.equal(vocabulary.rows, before)
    version = 1
    vocabulary.follow()
    assert torch.equal(vocabulary.rows, 2 * before)
