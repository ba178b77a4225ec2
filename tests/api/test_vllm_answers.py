"""vLLM's answers, made of outputs as SGLang has them."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.api.vllm import answers
from tlt_server.api.vllm.requests import Asked

ENDS = {1}
TEXTS = {token: f"<{token}>" for token in range(10)}
LOGPROB = st.floats(-50, 0) | st.just(-math.inf)


@st.composite
def positions(draw: st.DrawFn, length: int, count: int, first: bool = False) -> tuple[list[Any], list[Any]]:
    """Tokens, and the `count` likeliest of each position, the best first. first: nothing goes before the first."""
    tokens, best = [], []
    for position in range(length):
        if first and position == 0:
            tokens.append((None, draw(st.integers(0, 9)), None))
            best.append(None)
            continue
        order = draw(st.permutations(range(10)))
        logprobs = sorted(draw(st.lists(LOGPROB, min_size=10, max_size=10)), reverse=True)
        ranked = [(logprob, token, TEXTS[token]) for logprob, token in zip(logprobs, order, strict=True)]
        tokens.append(draw(st.sampled_from(ranked)))
        best.append(ranked[:count])
    return tokens, best


@st.composite
def outputs(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """One of SGLang's, with `count` of the likeliest tokens told of each position; none: as if 0 were asked for."""
    sampled, best = draw(positions(draw(st.integers(0, 4)), count))
    prompt, of_prompt = draw(positions(draw(st.integers(1, 4)), count, first=True))
    meta_info = {"input_token_logprobs": prompt, "output_token_logprobs": sampled}
    if count:
        meta_info |= {"input_top_logprobs": of_prompt, "output_top_logprobs": best}
    meta_info["finish_reason"] = {"type": "length", "length": len(sampled)}
    ids = [token for _, token, _ in sampled]
    return {"output_ids": ids, "prompt_token_ids": [token for _, token, _ in prompt], "meta_info": meta_info}


def read_as_trl_does(logprobs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Of each position the ids that are named, and their logprobs: the sampled one is among them, and no list is
    shorter than another."""
    positions = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    named = [{token: logprob} | top for token, logprob, top in positions]
    assert all(math.isfinite(logprob) for each in named for logprob in each.values())
    return [[int(name.removeprefix("token_id:")) for name in each] for each in named], [list(n.values()) for n in named]


@settings(max_examples=40)
@given(data=st.data(), asked=st.integers(0, 3), prompt=st.none() | st.integers(0, 4))
def test_completions_name_the_sampled_token_and_the_likeliest(data: st.DataObject, asked: int, prompt: Any) -> None:
    wanted = Asked(logprobs=asked, prompt_logprobs=prompt, return_tokens_as_token_ids=True)
    output = data.draw(outputs(wanted.most))
    choice = answers.complete({"choices": [{}]}, [output], wanted, ENDS)["choices"][0]
    ids, _ = read_as_trl_does(choice["logprobs"])
    told = output["meta_info"].get("output_top_logprobs") or [[]] * len(ids)
    for token, named, best in zip(output["output_ids"], ids, told, strict=True):
        assert set(named) == {token, *(each for _, each, _ in best[:asked])}
    assert all(len(top) <= asked + 1 for top in choice["logprobs"]["top_logprobs"])
    assert (choice["prompt_logprobs"] is None) == (prompt is None)


@settings(max_examples=40)
@given(data=st.data(), count=st.integers(0, 4))
def test_prompt_logprobs_hold_the_prompt_and_are_ranked(data: st.DataObject, count: int) -> None:
    output = data.draw(outputs(count))
    told = answers.prompt_logprobs(output, Asked(prompt_logprobs=count))
    assert told is not None
    assert (len(told), told[0]) == (len(output["prompt_token_ids"]), None)
    for token, each in zip(output["prompt_token_ids"][1:], told[1:], strict=True):
        assert each is not None
        best = [entry for entry in each.values() if entry["rank"] <= count]
        assert len(best) == count
        assert str(token) in each
        assert len(each) <= count + 1
        order = sorted(best, key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in order] == list(range(1, count + 1))
        assert [entry["logprob"] for entry in order] == sorted((e["logprob"] for e in best), reverse=True)
        assert all(math.isfinite(entry["logprob"]) for entry in each.values())


@settings(max_examples=40)
@given(data=st.data(), asked=st.integers(0, 3))
def test_tokens_are_evidence_of_what_was_sampled(data: st.DataObject, asked: int) -> None:
    """As renderers and SkyRL read it, and vLLM 0.33."""
    output = data.draw(outputs(asked))
    wanted = Asked(logprobs=asked, return_tokens_as_token_ids=True)
    choice = answers.tokens([output], wanted, ENDS)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token_id"] for entry in content] == choice["token_ids"] == output["output_ids"]
    assert all(math.isfinite(entry["logprob"]) and len(entry["top_logprobs"]) == asked for entry in content)
    assert answers.tokens([output], Asked(), ENDS)["choices"][0]["logprobs"] is None


def output_of(**meta_info: Any) -> dict[str, Any]:
    finish = {"type": "stop", "matched": 1}
    return {"output_ids": [5, 1], "prompt_token_ids": [7, 8], "meta_info": {"finish_reason": finish} | meta_info}


def test_texts_name_tokens_where_ids_were_not_asked_for() -> None:
    output = output_of(
        input_token_logprobs=[(None, 7, "ab"), (-1.0, 8, "c")],
        output_token_logprobs=[(-0.5, 5, "dé"), (-math.inf, 1, "")],
        output_top_logprobs=[[(-0.5, 5, "dé")], [(-0.25, 4, "x")]],
    )
    asked = Asked(logprobs=1)
    choice = answers.complete({"choices": [{"text": "t"}]}, [output], asked, ENDS)["choices"][0]
    assert choice["logprobs"] == {
        "text_offset": [0, 2],
        "tokens": ["dé", ""],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"dé": -0.5}, {"x": -0.25, "": -9999.0}],
    }
    echoed = answers.complete({"choices": [{}]}, [output], Asked(logprobs=0, echo=True), ENDS)["choices"][0]["logprobs"]
    assert echoed["tokens"] == ["ab", "c", "dé", ""]
    assert echoed["top_logprobs"][:2] == [None, {"c": -1.0}]
    talk = answers.chat({"choices": [{}]}, [output], asked, ENDS)
    assert talk["choices"][0]["logprobs"]["content"][0] == {
        **{"token": "dé", "logprob": -0.5, "bytes": [100, 195, 169]},
        "top_logprobs": [{"token": "dé", "logprob": -0.5, "bytes": [100, 195, 169]}],
    }


def test_a_chat_has_its_prompt_at_the_top() -> None:
    output = output_of(input_token_logprobs=[(None, 7, None), (-1.0, 8, None)], output_token_logprobs=[])
    asked = Asked(return_token_ids=True, prompt_logprobs=0)
    answer = answers.chat({"choices": [{}, {}]}, [output, output], asked, ENDS)
    assert answer["prompt_token_ids"] == [7, 8]
    assert answer["prompt_logprobs"] == [None, {"8": {"logprob": -1.0, "rank": 1}}]
    assert "logprobs" not in answer["choices"][0]  # SGLang's is null
    assert answers.chat({"choices": [{}]}, [output], Asked(), ENDS)["prompt_token_ids"] is None


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ({"type": "stop", "matched": 1}, None),
        ({"type": "stop", "matched": 5}, 5),
        ({"type": "stop", "matched": "\n"}, "\n"),
        ({"type": "length", "length": 5}, None),
        ({"type": "abort", "message": "Aborted"}, None),
    ],
)
def test_what_stopped_a_response(finish: dict[str, Any], reason: object) -> None:
    assert answers.stop_reason(output_of(finish_reason=finish), ENDS) == reason
    choice = answers.tokens([output_of(finish_reason=finish)], Asked(), ENDS)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish["type"], reason)


def test_weight_versions_are_told_where_they_were_asked_for() -> None:
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    asked, output = Asked(return_weight_versions=True), output_of(weight_versions=spans)
    for complete in (answers.complete, answers.chat):
        assert complete({"choices": [{}]}, [output], asked, ENDS)["choices"][0]["weight_versions"] == spans
        assert "weight_versions" not in complete({"choices": [{}]}, [output], Asked(), ENDS)["choices"][0]
    assert answers.tokens([output_of()], asked, ENDS)["choices"][0]["weight_versions"] == []


@given(prompts=st.integers(1, 5), samples=st.integers(1, 4))
def test_rounds_become_prompt_major(prompts: int, samples: int) -> None:
    rounds: list[Any] = [(prompt, sample) for sample in range(samples) for prompt in range(prompts)]
    assert answers.prompt_major(rounds, prompts) == sorted(rounds)
