"""The index: what it drafts, that it forgets in order, and that both forms are one."""

import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.errors import ConfigError
from tlt_server.history import compiled
from tlt_server.history.compiled import CompiledIndex, make_index
from tlt_server.history.index import (
    CLASSES,
    DEEPEST,
    LENGTHS,
    NOTHING,
    PAGE,
    SHARES,
    TAIL,
    VOTES,
    History,
    Judged,
    tail_of,
)
from tlt_server.history.reference import PlainIndex

Make = Callable[[int], History]
both = pytest.mark.parametrize("make", [PlainIndex, CompiledIndex])
RATES = np.linspace(0.1, 0.9, 20).reshape(CLASSES)
ROOMY = 1 << 22
"""Buckets, of which hardly two contexts share one: the plain index has none."""
PROMPT = tail_of(range(100, 120))


def said(index: History, number: int, tokens: list[int], prompt: int = 1, version: int = 0) -> None:
    index.begin(number, prompt, PROMPT, version)
    index.add([number], [len(tokens)], np.array(tokens, np.int32))


def drafted(index: History, number: int, most: int = 8) -> list[int]:
    drafts = index.draft([number], most)
    assert not drafts.tokens[0, drafts.lengths[0] :].any()
    return [int(token) for token in drafts.tokens[0, : drafts.lengths[0]]]


@both
def test_a_response_is_drafted_as_its_sibling_went_on(make: Make) -> None:
    index = make(64 * PAGE)
    said(index, 0, list(range(50)))
    said(index, 1, list(range(30)))
    assert drafted(index, 1) == list(range(30, 38))
    assert index.draft([1], 8).matched[0] == max(LENGTHS)
    assert index.draft([1], 8).chances[0].tolist() == [1.0] * 8


@both
def test_a_response_that_said_nothing_begins_as_its_sibling_did(make: Make) -> None:
    index = make(64 * PAGE)
    said(index, 0, [7, 8, 9])
    index.begin(1, 1, PROMPT, 0)
    assert drafted(index, 1) == []  # the prompt itself is no place: a response's first token has none before it
    index.add([1], [1], np.array([7], np.int32))
    assert drafted(index, 1) == [8, 9]


@both
def test_a_response_is_drafted_from_what_it_said_itself(make: Make) -> None:
    index = make(64 * PAGE)
    said(index, 0, [1, 2, 3, 4, 5, 1, 2])
    assert drafted(index, 0, 3) == [3, 4, 5]
    assert index.draft([0], 3).matched[0] == 2


@both
def test_the_most_votes_win_and_of_equals_the_newest(make: Make) -> None:
    index = make(64 * PAGE)
    for number, end in enumerate(([7, 7], [8, 8], [7, 9], [6, 6])):
        said(index, number, [1, 2, *end])
    said(index, 9, [1, 2])
    drafts = index.draft([9], 8)
    assert drafts.tokens[0, :2].tolist() == [7, 9]
    assert drafts.chances[0, :2].tolist() == [0.5, 0.25]


@both
def test_only_the_newest_vote(make: Make) -> None:
    index = make(64 * PAGE)
    for number in range(2 * VOTES):
        said(index, number, [1, 2, 3 if number < VOTES else 4])
    said(index, 99, [1, 2])
    assert drafted(index, 99) == [4]


@both
def test_a_draft_ends_where_too_few_agree(make: Make) -> None:
    index = make(64 * PAGE)
    for number in range(11):
        said(index, number, [1, 2, 10 + number])
    said(index, 99, [1, 2])
    assert drafted(index, 99) == []
    assert index.draft([99], 8).matched[0] == TAIL  # the prompt's end and the two


@both
def test_prompts_do_not_mix(make: Make) -> None:
    index = make(64 * PAGE)
    said(index, 0, list(range(50)), prompt=1)
    said(index, 1, list(range(30)), prompt=2)
    assert drafted(index, 1) == []
    assert index.draft([1], 8).versions[0] == 0


@both
def test_what_weights_said_it_is_told(make: Make) -> None:
    index = make(64 * PAGE)
    said(index, 0, list(range(20)), version=3)
    index.stamp([0], 5)
    index.add([0], [20], np.arange(20, 40, dtype=np.int32))
    for length, version in ((10, 3), (30, 5)):
        said(index, 1, list(range(length)))
        assert index.draft([1], 4).versions[0] == version
    said(index, 1, list(range(18)))
    assert drafted(index, 1) == list(range(18, 26)), "from page to page"


@both
def test_the_first_pages_are_forgotten_and_no_more_is_kept_than_the_capacity(make: Make) -> None:
    index = make(4 * PAGE)
    for number in range(40):
        said(index, number, list(range(1000 * number, 1000 * number + PAGE)))
        assert index.tokens == min(number + 1, 4) * PAGE
        for earlier in range(number + 1):
            index.begin(1000, 1, tail_of(range(1000 * earlier, 1000 * earlier + 4)), 0)
            assert bool(drafted(index, 1000)) == (earlier > number - 4), (number, earlier)


@both
def test_memory_is_bounded_whatever_is_written(make: Make) -> None:
    index = make(16 * PAGE)
    said(index, 0, [5] * (160 * PAGE))
    assert index.tokens == 16 * PAGE
    assert drafted(index, 0) == [5] * 8


@both
def test_a_response_goes_on_when_its_own_page_was_forgotten(make: Make) -> None:
    index = make(2 * PAGE)
    said(index, 0, [1, 2, 3, 4])
    said(index, 1, list(range(200, 200 + 2 * PAGE)))
    index.add([0], [3], np.array([9, 3, 4], np.int32))
    assert index.tokens == PAGE + 3
    index.begin(2, 1, tail_of([*PROMPT.tolist(), 1, 2, 3, 4, 9]), 0)
    assert drafted(index, 2) == [3, 4]


@both
def test_short_prompts_and_the_largest_tokens_are_like_others(make: Make) -> None:
    index, largest = make(64 * PAGE), 2**31 - 1
    for number, length in ((0, 3), (1, 1)):
        index.begin(number, 2**64 - 1, tail_of([]), 2**32 - 1)
        index.add([number], [length], np.array([largest, 0, largest][:length], np.int32))
    assert tail_of([5]).tolist() == [NOTHING] * 15 + [5]
    assert drafted(index, 1) == [0, largest]


@both
def test_no_requests_are_a_batch_too(make: Make) -> None:
    index = make(PAGE)
    index.add([], [], np.array([], np.int32))
    assert index.draft([], 7).tokens.shape == (0, 7)


@both
def test_a_response_that_never_began_is_an_error(make: Make) -> None:
    index = make(PAGE)
    with pytest.raises(KeyError, match="4"):
        index.draft([4], 3)


@both
def test_rows_are_taken_as_far_as_they_count(make: Make) -> None:
    rows, packed = make(64 * PAGE), make(64 * PAGE)
    for index in (rows, packed):
        for number in range(3):
            index.begin(number, 1, PROMPT, 0)
    rows.add([0, 1, 2], [3, 0, 2], np.array([[1, 2, 3], [9, 9, 9], [1, 2, 9]], np.int32))
    packed.add([0, 1, 2], [3, 0, 2], np.array([1, 2, 3, 1, 2], np.int32))
    for index in (rows, packed):
        assert index.tokens == 5
        assert drafted(index, 2) == [3]


def test_both_forms_are_one_of_many_responses() -> None:
    """More than are looked up together, each in another place of one text."""
    indexes = PlainIndex(200 * PAGE), CompiledIndex(200 * PAGE, ROOMY)
    text = np.random.default_rng(0).integers(0, 50, 200)
    for index in indexes:
        said(index, 99, text.tolist())
        for number in range(70):
            said(index, number, text[number : number + 2 + number].tolist(), prompt=1 + number % 2)
    looks = [index.look(range(70), 5, 9, RATES) for index in indexes]
    np.testing.assert_array_equal(looks[0][1], looks[1][1])
    for one, other in zip(looks[0][0], looks[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert (looks[0][0].lengths > 0).sum() > 30


@both
def test_a_draft_is_no_deeper_than_can_be(make: Make) -> None:
    index = make(64 * PAGE)
    said(index, 0, list(range(300)))
    said(index, 1, list(range(20)))
    assert drafted(index, 1, 100) == list(range(20, 20 + DEEPEST))


def test_memory_is_there_before_the_first_token() -> None:
    """It was had page by page as tokens came, in the midst of decoding: each a fault that clears up to 2 MB."""
    before, index = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, CompiledIndex(1 << 22)
    made = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tokens = np.random.default_rng(0).integers(0, 1 << 30, 1 << 12).astype(np.int32)
    said(index, 0, tokens.tolist())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - made < max(64, (made - before) / 2)


def test_what_c_could_not_hold_is_refused() -> None:
    index = CompiledIndex(PAGE)
    with pytest.raises(ValueError, match="65 tokens are to be judged"):
        index.look([], 0, DEEPEST + 1, RATES)


@both
def test_what_comes_is_judged_by_what_was_looked_up(make: Make) -> None:
    """Until a token is another one, or all came; each by the tokens that match before it, and its votes."""
    index = make(64 * PAGE)
    said(index, 0, list(range(50)))
    said(index, 1, list(range(10)))
    rates = np.full(CLASSES, 0.5)
    drafts, expected = index.look([1], 2, 4, rates)
    assert drafts.tokens.tolist() == [[10, 11]]
    assert expected.tolist() == [[0.5, 0.25, 0.125, 0.0625]]
    assert not index.judged().tokens.any()
    index.add([1], [3], np.array([10, 11, 0], np.int32))
    tried, came = index.judged().tokens
    sure = len(SHARES)
    assert (tried[-1, sure], came[-1, sure], tried.sum(), came.sum()) == (3, 2, 3, 2)
    index.add([1], [1], np.array([13], np.int32))
    assert not index.judged().tokens.any(), "once wrong, the rest says nothing"
    index.draft([1], 4)
    index.add([1], [1], np.array([14], np.int32))
    assert not index.judged().tokens.any(), "a draft alone is not judged"


@both
def test_a_look_is_held_against_what_the_one_before_promised(make: Make) -> None:
    index, rates = make(64 * PAGE), np.full(CLASSES, 0.5)
    said(index, 0, list(range(50)))
    said(index, 1, list(range(10)))
    index.look([1], 0, 2, rates)
    index.add([1], [2], np.array([10, 11], np.int32))
    assert not index.judged().looks.any(), "there was none before"
    index.look([1], 0, 4, rates)
    index.look([1], 0, 3, rates)
    index.add([1], [2], np.array([12, 0], np.int32))
    assert index.judged().looks.tolist() == [1, 0.75, 1, 0.5625, 0.75], "by the first that was not over"
    index.look([1], 0, 4, rates)
    assert index.judged().looks.tolist() == [1, 0.875, 0, 0.875**2, 0], "nothing is found"


operations = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 5), st.integers(1, 2), st.integers(0, 2)),
        st.tuples(st.just("add"), st.integers(0, 5), st.lists(st.integers(0, 3), min_size=1, max_size=40)),
        st.tuples(st.just("stamp"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("draft"), st.integers(1, 9)),
        st.tuples(st.just("look"), st.integers(1, 9), st.integers(0, 9)),
    ),
    max_size=60,
)


def judged_alike(*indexes: History) -> Judged:
    one, other = (index.judged() for index in indexes)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.looks, other.looks)  # sums, in another order
    return one


def same(ones: Sequence[Any], others: Sequence[Any]) -> None:
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@given(operations, st.integers(1, 16))
def test_both_forms_are_one(steps: list[Any], pages: int) -> None:
    indexes, begun = (PlainIndex(pages * PAGE), CompiledIndex(pages * PAGE, ROOMY)), set[int]()
    for name, *rest in steps:
        if name == "begin":
            number, prompt, tail = rest
            begun.add(number)
            for index in indexes:
                index.begin(number, prompt, tail_of([tail] * 20), 0)
        elif name == "clear":
            begun.clear()
            for index in indexes:
                index.clear()
                assert index.tokens == 0
        elif name == "draft":
            same(*(index.draft(sorted(begun), rest[0]) for index in indexes))
        elif name == "look":
            deepest, most = rest[0], min(rest)
            (drafts, plain), (others, fast) = (index.look(sorted(begun), most, deepest, RATES) for index in indexes)
            same((*drafts, plain), (*others, fast))
        elif rest[0] in begun:
            for index in indexes:
                if name == "stamp":
                    index.stamp([rest[0]], rest[1])
                else:
                    index.add([rest[0]], [len(rest[1])], np.array(rest[1], np.int32))
        assert indexes[0].tokens == indexes[1].tokens <= pages * PAGE
    judged_alike(*indexes)


@pytest.mark.slow
@pytest.mark.parametrize("letters", [2, 30])
def test_both_forms_are_one_over_long_texts(letters: int) -> None:
    """Batches, prompts and eviction as in a server, from texts that recur."""
    rng, indexes = np.random.default_rng(letters), (PlainIndex(300 * PAGE), CompiledIndex(300 * PAGE, ROOMY))
    texts = rng.integers(0, letters, (4, 600)).astype(np.int32)
    for _ in range(3):
        for number in range(16):
            for index in indexes:
                index.begin(number, number % 4, PROMPT, number)
        for at in range(0, 600, 5):
            new = texts[np.arange(16) % 4, at : at + 5].copy()
            new[rng.random(new.shape) < 0.05] = letters
            counts = rng.integers(0, 6, 16).astype(np.int32)
            for index in indexes:
                index.add(range(16), counts, new)
            plain, fast = (index.draft(range(16), 7) for index in indexes)
            for one, other in zip(plain, fast, strict=True):
                np.testing.assert_array_equal(one, other)
            looks, expected = zip(*(index.look(range(16), 3, 7, RATES) for index in indexes), strict=True)
            np.testing.assert_array_equal(*expected)
            np.testing.assert_array_equal(looks[0].tokens, plain.tokens[:, :3])
            tried, came = judged_alike(*indexes).tokens
            assert (came <= tried).all()
    assert indexes[0].tokens == indexes[1].tokens > 280 * PAGE


def test_without_a_compiler_there_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert isinstance(make_index(PAGE), PlainIndex)


def test_c_is_given_what_it_takes() -> None:
    index = CompiledIndex(PAGE)
    index.begin(0, 1, PROMPT, 0)
    with pytest.raises(ValueError, match=r"int64 \(1,\), where int32 \(1,\) is wanted"):
        index.add([0], [1], np.array([1]))
    with pytest.raises(ValueError, match=r"where int32 \(2,\) is wanted"):
        index.add([0], [2], np.array([1], np.int32))


def test_memory_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="not as much memory; take fewer"):
        CompiledIndex(2**36)


def test_c_compiles_without_a_warning(tmp_path: Path) -> None:
    strict = [*compiled.COMPILE, "-Wall", "-Wextra", "-Werror", "-o", tmp_path / "x.so", compiled.SOURCE]
    subprocess.run(strict, check=True)


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILE", ("cc", "-no-such-flag"))
    compiled.loaded.cache_clear()
    with pytest.raises(ConfigError, match="no-such-flag"):
        compiled.loaded()
    compiled.loaded.cache_clear()
