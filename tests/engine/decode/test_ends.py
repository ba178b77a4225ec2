"""Where a step of several tokens ends a response: at plain decoding's end, aborted or not; on upstream's requests."""

from array import array
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from tlt_server.demo import default_paths
from tlt_server.engine.decode.verify import settle_end

TOKENIZER: Any = get_tokenizer(str(default_paths()[0]))
VOCAB = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
WORDS = [token for token in range(VOCAB) if TOKENIZER.decode([token]) in ["a", "b", "1", " ", ".", "ab", " a"]]
BYTES = TOKENIZER.encode("é€", add_special_tokens=False)
"""Of characters that a step may cut in two."""
MOST = 12


class Grammar:
    """Ends with its nth token, which is the last one that upstream takes of a step."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def is_terminated(self) -> bool:
        return self.read >= self.length


tokens = st.one_of(st.sampled_from(WORDS), st.sampled_from(BYTES), st.just(EOS), st.just(VOCAB + 3))
params = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, MOST),
        "stop": st.lists(st.text("ab1 .é", min_size=1, max_size=3), max_size=2),
        "stop_token_ids": st.lists(st.sampled_from(WORDS), max_size=2),
        "stop_regex": st.sampled_from(["a+b", r"1\b", "b$", "a(?!b)", "^$", "[ab]{3}", r"\.\s?1", "(ab)+$"]),
        "ignore_eos": st.booleans(),
        "no_stop_trim": st.booleans(),
    },
)


def request(given_params: dict[str, Any], grammar: int | None) -> Req:
    sampling = SamplingParams(**{"max_new_tokens": 100, **given_params})
    sampling.normalize(TOKENIZER)
    req = Req("rid", "", array("q", [1, 2]), sampling, eos_token_ids={EOS}, vocab_size=VOCAB)
    req.tokenizer, req.grammar = TOKENIZER, None if grammar is None else Grammar(grammar)
    return req


def feed(req: Req, step: list[int], judge: Any) -> None:
    """As upstream settles a step."""
    if req.grammar is not None:
        step = step[: req.grammar.length - req.grammar.read]
        req.grammar.read += len(step)
    req.output_ids.extend(step)
    judge(req, len(step))


def plain(sampled: list[int], given_params: dict[str, Any], grammar: int | None) -> Req:
    req = request(given_params, grammar)
    for token in sampled:
        feed(req, [token], Req.judge_end)
        if req.finished():
            break
    return req


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(tokens, min_size=1, max_size=MOST + 6),
    params,
    st.lists(st.integers(1, 6), min_size=MOST + 6, max_size=MOST + 6),
    st.integers(1, MOST),
)
@example(WORDS[:4], {"stop": [TOKENIZER.decode(WORDS[1:3])]}, [3] * 18, 2)
def test_a_response_that_goes_on_ends_where_it_would_have(
    sampled: list[int], given_params: dict[str, Any], lengths: list[int], cut: int
) -> None:
    """Over cuts between two requests, and of the second one's steps."""
    expected = plain(sampled, given_params, None)
    before = sampled[:cut]
    if len(before) >= len(expected.output_ids_through_stop):
        return
    most = given_params.get("max_new_tokens", 100) - len(before)
    custom = {"custom_params": {"generated_tokens": len(before)}, "max_new_tokens": most}
    req = request(given_params | custom, None)
    req.origin_input_ids.extend(before)
    left = sampled[cut:]
    for length in lengths:
        step, left = left[:length], left[length:]
        if not step or req.finished():
            break
        feed(req, step, settle_end)
    assert req.sampling_params.max_new_tokens == most
    assert req.finished() == expected.finished()
    assert [*before, *req.output_ids_through_stop] == list(expected.output_ids_through_stop)
    if expected.finished():
        told, whole = req.finished_reason.to_json(), expected.finished_reason.to_json()
        if "length" in told:
            told["length"] += len(before)
        assert told == whole


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(tokens, min_size=1, max_size=MOST + 6),
    params,
    st.none() | st.integers(1, MOST),
    st.lists(st.integers(1, 6), min_size=MOST + 6, max_size=MOST + 6),
    st.none() | st.integers(0, 6),
)
@example([EOS, *WORDS[:5]], {"max_new_tokens": 3}, None, [6] * 18, 0)  # what upstream returns whole
def test_an_aborted_response_is_plain_decodings_up_to_its_end(
    sampled: list[int], given_params: dict[str, Any], grammar: int | None, lengths: list[int], abort_at: int | None
) -> None:
    """Over cuts of a response into steps, and a step at which it is aborted; a grammar allows EOS at its end alone."""
    if grammar is not None:
        sampled = [WORDS[0] if token == EOS and n != grammar else token for n, token in enumerate(sampled, start=1)]
    expected = plain(sampled, given_params, grammar)
    req = request(given_params, grammar)
    left = list(sampled)
    for number, length in enumerate(lengths):
        if number == abort_at:
            req.to_finish = FINISH_ABORT()
        step, left = left[:length], left[length:]
        if not step or req.finished():
            break
        feed(req, step, settle_end)
    aborted = isinstance(req.finished_reason, FINISH_ABORT)
    if aborted:
        assert abort_at is not None
        assert list(req.output_ids) == sampled[: sum(lengths[: abort_at + 1])]
        assert not expected.finished() or len(req.output_ids) < len(expected.output_ids_through_stop)
    else:
        assert req.finished() == expected.finished()
        assert list(req.output_ids_through_stop) == list(expected.output_ids_through_stop)
        if expected.finished():
            assert req.finished_reason.to_json() == expected.finished_reason.to_json()
    assert len(req.output_ids_through_stop) <= req.sampling_params.max_new_tokens
    assert (req.grammar is None) == (grammar is None)


@pytest.mark.parametrize(("token", "grammar", "ends"), [(EOS, 5, True), (WORDS[0], 5, False), (EOS, None, False)])
def test_a_grammar_that_reads_a_token_late_ends_with_it(token: int, grammar: int | None, ends: bool) -> None:
    """As after a plain step, whose end is judged before."""
    req = request({"ignore_eos": True}, grammar)
    req.output_ids.append(token)
    settle_end(req, 1)
    assert req.finished() == ends
    assert not ends or req.finished_reason.to_json() == {"type": "stop", "matched": EOS}


def test_a_bad_request_is_answered_as_one() -> None:
    req = request({"max_new_tokens": 1}, None)
    req.to_finish = FINISH_ABORT("wrong", HTTPStatus.BAD_REQUEST)
    feed(req, [WORDS[0]], settle_end)
    assert req.finished_reason.to_json()["message"] == "wrong"


@pytest.mark.parametrize("reached", [3, 4])
def test_reasoning_is_counted_up_to_the_end(reached: int) -> None:
    req = request({"max_new_tokens": 3}, None)
    req.reasoning_tokens = reached
    feed(req, [WORDS[0]] * 4, settle_end)
    assert req.reasoning_tokens == 3
