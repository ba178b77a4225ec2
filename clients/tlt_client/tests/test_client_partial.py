"""Rollouts that were cut short and go on: what is asked for, and one rollout of both parts."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_stand_in import ABORT, Handler, Json, drop_after_reading, rollout, says, serving

from tlt_client import (
    BadRequest,
    DrafterSpan,
    FinishReason,
    InvalidArgument,
    Rollout,
    SamplingParams,
    SpecCounts,
    TargetSpan,
)
from tlt_client.partial import joined

Connect = Callable[..., Any]

PROMPT = [65, 66]
SAMPLING = SamplingParams(max_new_tokens=10, min_new_tokens=4, sampling_seed=3)


def begun(*tokens: int, **fields: Any) -> Rollout:
    """One that was aborted."""
    return Rollout(
        rid="r",
        tokens=tokens,
        text="".join(map(chr, tokens)),
        completion_tokens=len(tokens),
        **{"logprobs": None, "finish_reason": FinishReason("abort"), "prompt_tokens": 2} | fields,
    )


def answers(*tokens: int, finish: Json | None = None, **meta: Any) -> Callable[[Handler, Json], None]:
    return lambda h, f: h.answer(200, rollout(f, list(tokens), finish or {"type": "stop", "matched": 2}, **meta))


def test_the_rest_is_asked_for_and_joined(connect: Connect) -> None:
    first = begun(67, 68, 69, logprobs=(-1.0, -2.0, -3.0), resamples=1, cached_tokens=1)
    with serving(answers(70, 2, prompt_tokens=5, cached_tokens=5, ignored=["sampling_seed"])) as server:
        whole = connect(server.url).continue_rollout(first, PROMPT, SAMPLING, extra={"priority": 1}, version=3)
        (asked,) = server.bodies
        assert server.versions == [{"X-TLT-Target-Version": "3"}]
    assert asked.pop("rid") == whole.rid != first.rid
    assert asked == {
        "input_ids": [65, 66, 67, 68, 69],
        "sampling_params": {"max_new_tokens": 7, "min_new_tokens": 1, "sampling_seed": 3},
        "return_logprob": True,
        "priority": 1,
        "stream": False,
    }
    assert (whole.tokens, whole.text, whole.logprobs) == ((67, 68, 69, 70, 2), "CDEF\x02", (-1, -2, -3, -0.07, -0.002))
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens, whole.resamples) == (2, 5, 1, 1)
    assert (whole.finish_reason, whole.ignored) == (FinishReason("stop", 2), ("sampling_seed",))


def test_the_rest_of_a_rollout_that_tells_its_seed_is_counted_by_the_server(connect: Connect) -> None:
    first = begun(67, 68, 69, seed=11)
    with serving(answers(70, finish=ABORT, seed=11), answers(71, seed=11)) as server:
        client = connect(server.url)
        again = client.continue_rollout(first, PROMPT, SAMPLING)
        whole = client.continue_rollout(again, PROMPT, SAMPLING)
        asked = [(fields["generated_tokens"], fields["sampling_params"]) for fields in server.bodies]
    assert (again.seed, whole.seed, whole.tokens) == (11, 11, (67, 68, 69, 70, 71))
    seeded = {"sampling_seed": 11, "min_new_tokens": 4}
    assert asked == [(3, seeded | {"max_new_tokens": 7}), (4, seeded | {"max_new_tokens": 6})]


def test_a_minimum_may_lie_near_the_end(connect: Connect) -> None:
    params = SamplingParams(max_new_tokens=10, min_new_tokens=9)
    with serving(answers(70, seed=11)) as server:
        connect(server.url).continue_rollout(begun(*range(70, 78), seed=11), PROMPT, params)
        assert server.bodies[0]["sampling_params"] == {"max_new_tokens": 2, "min_new_tokens": 9, "sampling_seed": 11}


def test_one_that_has_no_token_yet_begins_with_its_seed(connect: Connect) -> None:
    with serving(answers(70, seed=11)) as server:
        connect(server.url).continue_rollout(begun(seed=11), PROMPT, SAMPLING)
        assert "generated_tokens" not in server.bodies[0]
        assert server.bodies[0]["sampling_params"]["sampling_seed"] == 11


def test_a_limit_is_that_of_the_whole(connect: Connect) -> None:
    with serving(answers(70, 71, finish={"type": "length", "length": 2})) as server:
        whole = connect(server.url).continue_rollout(begun(67), PROMPT, SamplingParams(max_new_tokens=3))
    assert whole.finish_reason == FinishReason("length", length=3)


def test_what_is_whole_is_not_sent(connect: Connect) -> None:
    over = [begun(67, finish_reason=FinishReason("stop", 2)), begun(*range(70, 80))]
    with serving() as server:
        client = connect(server.url)
        first, second = client.continue_batch(over, [PROMPT, PROMPT], SAMPLING)
        assert client.continue_rollout(first, PROMPT, SAMPLING) is first is over[0]
        assert client.continue_batch([], [], SAMPLING) == []
        assert not server.other
    assert second == msgspec.structs.replace(over[1], finish_reason=FinishReason("length", length=10))


def test_a_continuation_may_be_cut_again_and_go_on(connect: Connect) -> None:
    with serving(answers(68, finish=ABORT), answers(69)) as server:
        client = connect(server.url)
        again = client.continue_rollout(begun(67), PROMPT, SAMPLING)
        assert (again.aborted, again.text) == (True, "CD")
        assert client.continue_rollout(again, PROMPT, SAMPLING).text == "CDE"
        assert [fields["sampling_params"]["max_new_tokens"] for fields in server.bodies] == [9, 8]


def test_a_lost_continuation_is_sampled_anew_and_counted_once(connect: Connect) -> None:
    with serving(drop_after_reading, answers(68)) as server:
        whole = connect(server.url).continue_rollout(begun(67, resamples=1), PROMPT, SAMPLING)
        assert [fields["input_ids"] for fields in server.bodies] == [[65, 66, 67]] * 2
    assert (whole.text, whole.resamples) == ("CD", 2)


def test_a_batch_that_fails_holds_the_rollouts_that_are_complete(connect: Connect) -> None:
    def last(handler: Handler, fields: Json) -> None:
        time.sleep(0.3)
        says(400, "bad")(handler, fields)

    acts = {"[65, 66, 67]": answers(68), "[65, 66, 69]": last}
    with serving(*[lambda h, f: acts[str(f["input_ids"])](h, f)] * 2) as server:
        client = connect(server.url)
        rollouts = [begun(67), begun(9, finish_reason=FinishReason("stop")), begun(69)]
        with pytest.raises(BadRequest) as raised:
            client.continue_batch(rollouts, [PROMPT] * 3, SAMPLING)
    assert {i: each.text for i, each in raised.value.finished.items()} == {0: "CD", 1: "\t"}


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("AB", {"max_new_tokens": 9}, "give its token ids"),
    ([], {"max_new_tokens": 9}, "at least one"),
    (PROMPT, {}, "max_new_tokens=None and 3 tokens"),
    (PROMPT, {"max_new_tokens": 2}, "max_new_tokens=2 and 3 tokens"),
    (PROMPT, {"max_new_tokens": 9, "regex": "a+"}, "regex looks back"),
    (PROMPT, {"max_new_tokens": 9, "frequency_penalty": 0.5}, "frequency_penalty looks back"),
    (PROMPT, {"max_new_tokens": 9, "repetition_penalty": 1.5}, "repetition_penalty looks back"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), WRONG)
def test_what_cannot_be_continued_is_refused(
    connect: Connect, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        connect("http://server").continue_rollout(begun(1, 2, 3), prompt, SamplingParams(**params))


def test_each_rollout_has_a_prompt(connect: Connect) -> None:
    with pytest.raises(InvalidArgument, match="1 prompts for 2 rollouts"):
        connect("http://server").continue_batch([begun(1)] * 2, [PROMPT], SAMPLING)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """With versions that credit each token, and counts of speculation that may be absent."""
    versions = draw(st.lists(st.integers(0, 2), max_size=6))
    tokens, spans, drafted = [], [], []
    for version in versions:
        length = draw(st.integers(1, 3))
        spans.append(TargetSpan(len(tokens), len(tokens) + length, str(version), version))
        drafted.append(DrafterSpan(len(tokens), len(tokens) + length, version))
        tokens += [version] * length
    calls = draw(st.integers(0, 9))
    spec = SpecCounts(calls, draw(st.integers(0, 30)), 30) if tokens else None
    length = 1 + spec.accepted_drafts / calls if spec and calls else None
    return begun(
        *tokens,
        logprobs=tuple(float(t) for t in tokens),
        weight_versions=tuple(spans),
        drafter_versions=tuple(drafted),
        spec=spec,
        accept_length=length,
    )


@given(rollouts(), rollouts())
def test_every_token_keeps_its_version(first: Rollout, second: Rollout) -> None:
    whole = joined(first, second)
    assert whole.tokens == first.tokens + second.tokens
    for spans in (whole.weight_versions, whole.drafter_versions):
        assert [int(span.version) for span in spans for _ in range(span.start, span.end)] == list(whole.tokens)
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
    parts = [part.spec for part in (first, second) if part.spec]
    calls, accepted = sum(spec.verify_calls for spec in parts), sum(spec.accepted_drafts for spec in parts)
    assert (whole.spec.verify_calls if whole.spec else 0) == calls
    if calls and all(spec.verify_calls for spec in parts):
        assert whole.accept_length == pytest.approx(1 + accepted / calls)


@given(rollouts(), rollouts(), rollouts())
def test_it_does_not_matter_where_a_rollout_was_cut(first: Rollout, second: Rollout, third: Rollout) -> None:
    one, other = joined(joined(first, second), third), joined(first, joined(second, third))
    assert one.accept_length == pytest.approx(other.accept_length)
    assert msgspec.structs.replace(one, accept_length=None) == msgspec.structs.replace(other, accept_length=None)


def test_tokens_that_a_server_credits_to_nobody_are_not_credited_in_part() -> None:
    credited = begun(1, weight_versions=(TargetSpan(0, 1, "a"),))
    for parts in ((begun(1), credited), (credited, begun(1))):
        assert joined(*parts).weight_versions == ()
    assert joined(begun(), credited).weight_versions == (TargetSpan(0, 1, "a"),)
