"""vLLM's requests: what of them is taken, and what becomes of it."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.test_fields import CHAT, JSON, SERVER
from tlt_server.api.fields import vllm
from tlt_server.api.fields.field import Effect
from tlt_server.api.fields.routes import TABLES, VLLM_TABLES
from tlt_server.api.vllm import requests
from tlt_server.errors import BadRequest

PROMPT = {"/v1/completions": {"prompt": [5, 6]}, "/v1/chat/completions": CHAT, "/inference/v1/generate": {}}
GENERATE = "/inference/v1/generate"
OPENAI = ["/v1/completions", "/v1/chat/completions"]


def ask(path: str, **fields: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6], "sampling_params": fields} if path == GENERATE else PROMPT[path] | fields


def accept(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return VLLM_TABLES[path].accept(json.loads(json.dumps(body)), SERVER)


def sglangs(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What SGLang gets of a request of vLLM's."""
    accepted, _ = accept(path, body)
    if path == GENERATE:
        return requests.native(accepted, SERVER.context)
    known = TABLES[path].fields
    return {name: value for name, value in requests.openai(accepted, SERVER.context).items() if name in known}


SAMPLED = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 100) | st.none(),
        "top_p": st.floats(0.01, 1) | st.none(),
        "top_k": st.integers(-1, 100) | st.none(),
        "min_p": st.floats(0, 1) | st.none(),
        "max_tokens": st.integers(1, 2**31 - 1) | st.none(),
        "min_tokens": st.just(0) | st.none(),
        "frequency_penalty": st.floats(-2, 2) | st.none(),
        "presence_penalty": st.floats(-2, 2) | st.none(),
        "repetition_penalty": st.floats(0, 2, exclude_min=True) | st.none(),
        "n": st.integers(1, 8),
        "seed": st.integers(0, 2**63 - 1) | st.none(),
        "stop": st.sampled_from(["a", ["a", "b"], None]),
        "stop_token_ids": st.lists(st.integers(0, 511), min_size=1, max_size=3) | st.none(),
        "include_stop_str_in_output": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.integers(0, 20) | st.none(),
        "logit_bias": st.just({"5": 1.0}),
        "structured_outputs": st.sampled_from(
            [None, {}, {"regex": "[0-9]+"}, {"json": {"type": "object"}}, {"json": "{}"}, {"grammar": 'root ::= "a"'}]
        ),
    },
)


@given(path=st.sampled_from([*OPENAI, GENERATE]), fields=SAMPLED)
def test_what_is_taken_is_what_sglangs_own_table_takes(path: str, fields: dict[str, Any]) -> None:
    made = sglangs(path, ask(path, **fields))
    own = "/generate" if path == GENERATE else path
    assert TABLES[own].accept(made, SERVER)[0] == made
    params = made["sampling_params"] if path == GENERATE else made
    assert params.get("top_k") == (-1 if fields.get("top_k") == 0 else fields.get("top_k"))
    for name in ("temperature", "top_p", "min_p", "stop", "logit_bias", "ignore_eos"):
        assert params.get(name) == fields.get(name)
    assert params.get("no_stop_trim") == fields.get("include_stop_str_in_output")


def test_a_trainers_whole_request() -> None:
    """TRL's, as it sends them."""
    neutral = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked = {"prompt": [[5, 6], [7]], "n": 8, "max_tokens": 16, "logprobs": 0, **neutral, **ids}
    accepted, ignored = accept("/v1/completions", asked | {"seed": 2**62, "model": "m"})
    assert (ignored, accepted["seed"]) == ([], 2**62)
    assert requests.asked_by(accepted) == requests.Asked(logprobs=0, **ids)
    accepted, ignored = accept("/v1/chat/completions", CHAT | neutral | ids | {"logprobs": True, "top_logprobs": 3})
    assert (requests.asked_by(accepted).logprobs, ignored) == (3, [])
    accepted, _ = accept("/v1/chat/completions", CHAT | {"logprobs": False, "top_logprobs": None})
    assert requests.asked_by(accepted).logprobs is None


def test_tokens_in_tokens_out() -> None:
    params = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 9}
    params |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None, "n": 1}
    body = {"token_ids": [5, 6], "sampling_params": params | {"output_kind": 2}, "cache_salt": "7", "request_id": "a"}
    accepted, ignored = accept(GENERATE, body)
    assert ignored == []
    assert requests.native(accepted, 2048) == {
        "input_ids": [5, 6],
        "rid": "a",
        "extra_key": "7",
        "sampling_params": {
            **{"max_new_tokens": 9, "min_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
            **{"n": 1, "skip_special_tokens": True, "no_stop_trim": True},
        },
    }
    asked = requests.asked_of_tokens(accepted)
    assert (asked.logprobs, asked.return_tokens_as_token_ids, asked.most) == (1, True, 1)
    assert requests.native(accept(GENERATE, {"token_ids": [5]})[0], 2048)["sampling_params"] == {"max_new_tokens": 2048}


@pytest.mark.parametrize(
    ("wanted", "made"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"', "json": None}, {"ebnf": 'root ::= "a"'}),
        ({"json": {"type": "string"}}, {"json_schema": '{"type": "string"}'}),
        ({"json": '{"type": "string"}', "disable_fallback": False}, {"json_schema": '{"type": "string"}'}),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
        ({"json_object": False}, {}),
    ],
)
def test_grammars(wanted: dict[str, Any], made: dict[str, str]) -> None:
    params = sglangs(GENERATE, ask(GENERATE, structured_outputs=wanted))["sampling_params"]
    assert params == {"max_new_tokens": SERVER.context} | made
    asked = sglangs("/v1/chat/completions", ask("/v1/chat/completions", structured_outputs=wanted))
    if schema := made.get("json_schema"):
        assert asked["response_format"]["json_schema"]["schema"] == json.loads(schema)
    else:
        assert asked == CHAT | made


REFUSED: list[tuple[str, Any]] = [
    *(("structured_outputs", {name: value}) for name, value in (("choice", ["a"]), ("structural_tag", "{}"))),
    ("structured_outputs", {"regex": "a", "grammar": "root ::= 'a'"}),
    ("structured_outputs", {"regex": "[", "json": 5}),
    ("structured_outputs", {"regex": "(" * 100}),
    *((name, 2.5) for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
    *((name, ["a"]) for name in ("bad_words", "allowed_token_ids", "logits_processors")),
    *((name, {"a": 1}) for name in ("vllm_xargs", "extra_args")),
    *(("top_k", value) for value in (-2, 0.5, True, "0")),
    *(("prompt_logprobs", value) for value in (-1, 1e9)),
    ("use_beam_search", True),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("logit_bias", {"512": 1.0}),
    ("stop_token_ids", [512]),
]


@pytest.mark.parametrize("path", [*OPENAI, GENERATE])
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_served_is_refused_by_its_name(path: str, name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name):
        accept(path, ask(path, **{name: value}))


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (
            "/v1/completions",
            {"stream": True, "return_tokens_as_token_ids": True},
            "return_tokens_as_token_ids: not in a",
        ),
        ("/v1/completions", {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs: not in a stream"),
        ("/v1/chat/completions", {"stream": True, "return_weight_versions": True}, "return_weight_versions: not in a"),
        ("/v1/completions", {"structured_outputs": {"regex": "a"}, "ebnf": "root ::= 'a'"}, "ebnf: beside"),
        ("/v1/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0"),
        ("/v1/completions", {"truncation_side": "middle"}, "truncation_side: "),
        ("/v1/completions", {"truncate_prompt_tokens": 3, "echo": True}, "echo: "),
        ("/v1/completions", {"rid": "a", "request_id": "b"}, "rid: "),
    ],
)
def test_what_does_not_go_together_is_refused(path: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=f"^{why}"):
        accept(path, ask(path, **fields))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "token_ids: missing"),
        ({"token_ids": []}, "token_ids: a prompt without"),
        ({"token_ids": [[5]]}, "token_ids"),
        ({"token_ids": [512]}, "token_ids: holds 512"),
        ({"token_ids": [5], "stream": True}, "stream: not served here"),
        ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features: this server takes tokens"),
        ({"token_ids": [5], "output_mode": "text"}, "output_mode"),
        ({"token_ids": [5], "max_tokens": 5}, "max_tokens: goes into sampling_params"),
        ({"token_ids": [5], "sampling_params": {"min_tokens": 5, "max_tokens": 4}}, "sampling_params.min_tokens: 5"),
        (
            {"token_ids": [5], "sampling_params": {"min_tokens": 1, "structured_outputs": {"regex": "a?"}}},
            "sampling_params.min_tokens: beside a grammar",
        ),
        (
            {"token_ids": [5], "sampling_params": {"truncate_prompt_tokens": 4}},
            "sampling_params.truncate_prompt_tokens",
        ),
    ],
)
def test_requests_for_tokens_that_are_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=f"^{why}"):
        accept(GENERATE, body)


def test_nobody_is_refused_for_asking_for_more_than_the_context() -> None:
    made = sglangs("/v1/chat/completions", CHAT | {"max_completion_tokens": 10**6})
    assert made["max_completion_tokens"] == SERVER.context


def test_an_id_is_not_taken_twice() -> None:
    busy = SERVER._replace(in_use=lambda rid: rid == "a_1")
    asked = {"prompt": ["3", "4"], "request_id": "a", "stream": True}
    with pytest.raises(BadRequest, match="under way"):
        VLLM_TABLES["/v1/completions"].accept(asked, busy)


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    kept=st.sampled_from([None, -1, *range(1, 12)]),
    side=st.sampled_from(["left", "right"]),
    room=st.integers(1, 12),
)
def test_prompts_are_cut_at_the_side_that_is_named(prompt: list[int], kept: int | None, side: Any, room: int) -> None:
    left = requests.Asked(truncate_prompt_tokens=kept, truncation_side=side).keep(prompt, room)
    most = len(prompt) if kept is None else room if kept == -1 else kept
    assert len(left) == min(len(prompt), most)
    assert left == (prompt[len(prompt) - len(left) :] if side == "left" else prompt[: len(left)])


@settings(max_examples=30)
@given(path=st.sampled_from(sorted(VLLM_TABLES)), data=st.data())
def test_no_value_of_any_field_is_an_exception(path: str, data: st.DataObject) -> None:
    body = {"/tokenize": {"prompt": "3"}, "/detokenize": {"tokens": [5]}}.get(path.removeprefix("/v1"), {})
    body = body or ask(path)
    body = body | {data.draw(st.sampled_from(sorted(VLLM_TABLES[path].fields))): data.draw(JSON)}
    if path == GENERATE:
        inner = {data.draw(st.sampled_from(sorted(vllm.PARAMS.fields))): data.draw(JSON)}
        body = body | {"sampling_params": inner}
    with suppress(BadRequest):
        accepted, _ = accept(path, body)
        lead(path, accepted)


def lead(path: str, accepted: dict[str, Any]) -> None:
    if path == GENERATE:
        requests.native(accepted, 2048)
        requests.asked_of_tokens(accepted)
    elif path in OPENAI:
        requests.openai(accepted, 2048)
        requests.asked_by(accepted)


def test_each_sampling_parameter_reaches_sglang_or_the_answer() -> None:
    names = {name for name, field in vllm.PARAMS.fields.items() if field.effect is not Effect.REFUSED}
    handled = requests.OF_THE_ANSWER | set(requests.NATIVE) | {"structured_outputs"}
    assert names - handled <= set(TABLES["/generate"].fields["sampling_params"].inner.fields)  # type: ignore[union-attr]
