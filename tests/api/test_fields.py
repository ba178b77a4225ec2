"""The table of fields: whole, and true of requests; the gate that holds them against it."""

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.safety.bodies import LEGAL, hostile
from tlt_server.api.fields import openai, scores
from tlt_server.api.fields.anthropic import COUNT_TOKENS, MESSAGES
from tlt_server.api.fields.field import Effect, Field, Server, Table
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import EMBED, GENERATE, SAMPLING
from tlt_server.api.fields.patterns import is_grammar, is_stop_patterns
from tlt_server.api.fields.routes import TABLES
from tlt_server.api.fields.shown import as_markdown
from tlt_server.api.rollouts.gate import MAX_BODY, MAX_NAMED, Gate
from tlt_server.api.rollouts.scope import PARSED, TOLD
from tlt_server.errors import BadRequest
from tlt_server.metrics import MAX_NAMES, _ignored, count_ignored

DOCS = Path(__file__).parents[2] / "docs/fields.md"
SERVER = Server(vocab=512, context=2048, hidden=128)
SHORT = {"max_new_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "3"}]}


def models() -> list[tuple[Table, set[str]]]:
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    pydantic = {
        openai.COMPLETION: protocol.CompletionRequest,
        openai.CHAT: protocol.ChatCompletionRequest,
        scores.EMBEDDING: protocol.EmbeddingRequest,
        scores.CLASSIFY: protocol.ClassifyRequest,
        scores.SCORE: protocol.ScoringRequest,
        scores.RERANK: protocol.V1RerankReqInput,
        openai.TOKENIZE: protocol.TokenizeRequest,
        openai.DETOKENIZE: protocol.DetokenizeRequest,
        MESSAGES: anthropic.AnthropicMessagesRequest,
        COUNT_TOKENS: anthropic.AnthropicCountTokensRequest,
    }
    assert {id(table) for table in TABLES.values()} == {id(table) for table in (GENERATE, EMBED, *pydantic)}
    return [
        (SAMPLING, set(SamplingParams.__struct_fields__)),
        (GENERATE, {field.name for field in dataclasses.fields(GenerateReqInput)}),
        (EMBED, {field.name for field in dataclasses.fields(EmbeddingReqInput)}),
        *((table, set(model.model_fields)) for table, model in pydantic.items()),
    ]


def test_every_field_of_upstreams_models_is_in_the_table() -> None:
    """Upstream's chat reads `reasoning` before its model does."""
    history = {"history", "history_namespace"}
    extra = {openai.CHAT: {"reasoning", *history}, GENERATE: {"generated_tokens", *history}, openai.COMPLETION: history}
    for table, fields in models():
        assert set(table.fields) == fields | extra.get(table, set()), table.name


def test_the_docs_are_made_from_the_code() -> None:
    assert DOCS.read_text() == as_markdown(), "python -m tlt_server.api.fields > docs/fields.md"


def refused(path: str, body: dict[str, Any]) -> str:
    """Why a request is; nothing for one that is not."""
    try:
        TABLES[path].accept(body, SERVER)
    except BadRequest as error:
        return str(error)
    return ""


def accept(path: str, body: dict[str, Any], server: Server = SERVER) -> tuple[dict[str, Any], list[str]]:
    return TABLES[path].accept(json.loads(json.dumps(body)), server)


@pytest.mark.parametrize("path", [path for path in LEGAL if path != "/encode"])
def test_legal_requests_pass_as_they_are(path: str) -> None:
    for body in LEGAL[path]:
        assert accept(path, body) == (body, [])


FOREIGN_REFUSED = [field for field in FOREIGN.values() if field.effect is Effect.REFUSED]


@pytest.mark.parametrize("field", FOREIGN_REFUSED, ids=lambda field: field.name)
@pytest.mark.parametrize(
    ("path", "inside"), [("/generate", False), ("/generate", True), ("/v1/chat/completions", False)]
)
def test_what_changes_a_sample_and_is_not_served_is_refused(field: Field, path: str, inside: bool) -> None:
    table = SAMPLING if inside else TABLES[path]
    if field.name in table.fields:
        pytest.skip("a field of its own")

    def body(value: object) -> dict[str, Any]:
        asked = {"text": "3"} if path == "/generate" else CHAT
        return asked | ({"sampling_params": {field.name: value}} if inside else {field.name: value})

    with pytest.raises(BadRequest, match=field.name):
        accept(path, body({"anything": 1}))
    for neutral in (None, {}, *TABLES[path].others[field.name].neutral):
        assert accept(path, body(neutral))[1] == []


FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "3", "sampling_params": {"regex": "a?", "min_new_tokens": 1}}),
        ("/v1/completions", {"prompt": "3", "ebnf": 'root ::= "a"', "min_tokens": 1}),
        ("/v1/completions", {"prompt": "3", "response_format": FORM, "min_tokens": 1}),
        ("/v1/chat/completions", {**CHAT, "regex": "a?", "min_tokens": 1}),
    ],
)
def test_a_grammar_may_end_before_any_minimum(path: str, body: dict[str, Any]) -> None:
    """Where it allows the end alone, and the minimum forbids it, no token is left to sample."""
    with pytest.raises(BadRequest, match="beside a grammar"):
        accept(path, body)


@pytest.mark.parametrize("name", ["temperature", "n", "stop", "json_schema", "logit_bias"])
def test_a_parameter_in_the_wrong_place_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=rf"^{name}: .*sampling_params"):
        accept("/generate", {"text": "3", name: "5"})


def test_strangers_are_named_and_neutral_values_are_not() -> None:
    body = {"text": "3", "sampling_params": SHORT | {"sampling_seed": 3, "odd": [1]}, "odder": 1, "oddest": None}
    accepted, ignored = accept("/generate", body)
    assert ignored == ["odder", "odd"]
    assert accepted == {"text": "3", "sampling_params": SHORT | {"sampling_seed": 3}}
    assert accept("/v1/completions", {"prompt": "3", "seed": None, "odd": None}) == ({"prompt": "3"}, [])
    with pytest.raises(BadRequest, match=r"odder.*--strict-fields"):
        accept("/generate", body, SERVER._replace(strict=True))


SEEDED = {
    "/generate": lambda seed: {"text": "3", "sampling_params": {"sampling_seed": seed}},
    "/v1/completions": lambda seed: {"prompt": "3", "seed": seed},
    "/v1/chat/completions": lambda seed: CHAT | {"seed": seed},
}


@pytest.mark.parametrize("path", SEEDED)
@given(seed=st.integers(-(2**63), 2**64 - 1))
def test_seeds_are_honoured(path: str, seed: int) -> None:
    body = SEEDED[path](seed)
    assert accept(path, body, SERVER._replace(strict=True)) == (body, [])


@pytest.mark.parametrize("path", SEEDED)
@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 2**200, 1.5, 3.0, True, "3", [3], {}])
def test_what_is_no_seed_is_refused_in_a_line(path: str, seed: Any) -> None:
    with pytest.raises(BadRequest, match=r"^(sampling_params\.sampling_)?seed: [^\n]+$"):
        accept(path, SEEDED[path](seed))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "3", "seed": 3}),
        ("/generate", {"text": "3", "sampling_seed": 3}),
        ("/generate", {"text": "3", "sampling_params": {"seed": 3}}),
        ("/v1/completions", {"prompt": "3", "sampling_seed": 3}),
        ("/v1/chat/completions", CHAT | {"sampling_seed": 3}),
    ],
)
def test_a_seed_of_another_dialect_is_refused_with_its_name_here(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"here it is|goes into sampling_params"):
        accept(path, body)


GOES_ON = {"input_ids": [5, 6, 7], "generated_tokens": 2}


@pytest.mark.parametrize(
    "body",
    [
        GOES_ON,
        GOES_ON | {"sampling_params": {"n": 2, "min_new_tokens": 5, "max_new_tokens": 3}},
        {"input_ids": [[5, 6], [7]], "generated_tokens": [1, None]},
        {"input_ids": [[5, 6], [7, 8]], "generated_tokens": 1},
        {"text": "3", "generated_tokens": 0},
    ],
)
def test_a_response_that_goes_on(body: dict[str, Any]) -> None:
    assert accept("/generate", body) == (body, [])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (GOES_ON | {"generated_tokens": 3}, "generated_tokens: 3, of 3 input ids"),
        (GOES_ON | {"generated_tokens": -1}, "generated_tokens: "),
        (GOES_ON | {"generated_tokens": True}, "generated_tokens: "),
        (GOES_ON | {"generated_tokens": [1]}, "generated_tokens: a list, beside a single prompt"),
        ({"input_ids": [[5, 6], [7]], "generated_tokens": 1}, "generated_tokens: 1, of 1 input ids"),
        ({"input_ids": [[5, 6], [7]], "generated_tokens": [1]}, "generated_tokens: a list of 1"),
        ({"text": "abc", "generated_tokens": 1}, "generated_tokens: counts input_ids"),
        (
            GOES_ON | {"sampling_params": {"min_new_tokens": 6, "max_new_tokens": 3}},
            "sampling_params.min_new_tokens: 6 is more than max_new_tokens, 3 and the 2 generated tokens",
        ),
        (
            GOES_ON | {"sampling_params": {"custom_params": {"generated_tokens": 1}}},
            "sampling_params.custom_params: generated_tokens goes beside sampling_params",
        ),
        ({"text": "3", "sampling_params": {"generated_tokens": 1}}, "sampling_params.generated_tokens: goes beside"),
    ],
)
def test_a_response_that_cannot_go_on_so(body: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=f"^{re.escape(why)}"):
        accept("/generate", body)


def test_what_a_server_must_be_started_for() -> None:
    asked = {"text": "3", "custom_logit_processor": "p"}
    with pytest.raises(BadRequest, match="--no-speculation"):
        accept("/generate", asked)
    accept("/generate", asked, SERVER._replace(can=frozenset({"plain"})))
    with pytest.raises(BadRequest, match="--enable-lora"):
        accept("/generate", {"text": "3", "lora_path": "a"})


def test_what_is_refused_is_dropped_where_it_asks_for_nothing() -> None:
    nothing = {"received_time": False, "lora_id": "", "image_data": [], "positional_embed_overrides": {}}
    assert accept("/generate", {"text": "3"} | nothing) == ({"text": "3"}, [])
    assert accept("/v1/completions", {"prompt": "3", "best_of": 1}) == ({"prompt": "3"}, [])


def test_null_is_a_parameters_value_and_elsewhere_nothing() -> None:
    """Upstream's max_new_tokens is 128 if it is not given, and up to the context if it is null."""
    body = {"text": "3", "rid": None, "sampling_params": {"max_new_tokens": None}}
    assert accept("/generate", body)[0] == {"text": "3", "sampling_params": {"max_new_tokens": None}}


RANGES = {"temperature": (0, 1e6), "top_p": (1e-9, 1), "min_p": (0, 1), "top_k": (1, 2**30), "n": (1, 1024)}


@given(name=st.sampled_from(sorted(RANGES)), value=st.integers() | st.floats())
def test_numbers_pass_within_their_ranges_alone(name: str, value: float) -> None:
    low, high = RANGES[name]
    whole = name in ("top_k", "n")
    right = (low <= value <= high and (not whole or isinstance(value, int))) or (name, value) == ("top_k", -1)
    if (name == "top_p" and 0 < value < low) or (name == "top_k" and value == -1):
        return  # also right; -1.0 is not whole
    why = refused("/generate", {"text": "3", "sampling_params": {name: value}})
    assert (why == "") == right
    assert right or name in why


@given(ids=st.lists(st.integers(-3, 515) | st.booleans() | st.floats(0, 5), max_size=5))
def test_ids_are_of_the_vocabulary(ids: list[Any]) -> None:
    right = bool(ids) and all(type(each) is int and 0 <= each < SERVER.vocab for each in ids)
    for body in ({"input_ids": ids}, {"input_ids": [ids, [5]]}):
        assert (refused("/generate", body) == "") == right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(path=st.sampled_from(sorted(LEGAL)), data=st.data())
def test_no_value_of_any_field_is_an_exception(path: str, data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(LEGAL[path])) | {
        data.draw(st.sampled_from(sorted(TABLES[path].fields))): data.draw(JSON)
    }
    if path == "/generate" and data.draw(st.booleans()):
        body = body | {"sampling_params": {data.draw(st.sampled_from(sorted(SAMPLING.fields))): data.draw(JSON)}}
    assert len(refused(path, body)) < 500


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+$", "(a|a)*b", "(a|ab)+", "(x+x+)+y", "(.*)*", "[", "(a){99999}{99999}", "(" * 300),
        *("(?>(a+)+b)", "((a+)+b)?+", "(a)?(?(1)(b+)+c|d)"),
    ],
)
def test_stop_patterns_that_may_never_end_are_refused(pattern: str) -> None:
    with pytest.raises(BadRequest):
        is_stop_patterns(pattern, SERVER)


@pytest.mark.parametrize(
    "pattern", [r"\d+", r"(foo|bar)+", r"\n\n+", r"[a-z]{2,9}\.", r"^The answer is .*\.$", r"\{2000000\}"]
)
def test_plain_stop_patterns_pass(pattern: str) -> None:
    is_stop_patterns([pattern], SERVER)


def test_grammars_are_bounded_by_what_they_amount_to() -> None:
    is_grammar('root ::= "a"{1,20} | [0-9]{4} "-" ("x" "y"){50}', SERVER)
    for bomb in ("(((a{99}){99}){99}){99}", "a{9999999999}", "(" * 1000, "x" * 70_000):
        with pytest.raises(BadRequest):
            is_grammar(bomb, SERVER)


def test_batches_fit_together() -> None:
    two = {"text": ["3", "4"]}
    for wrong in (
        {"sampling_params": [SHORT]},
        {"rid": ["a", "a"]},
        {"return_logprob": [True]},
        {"top_logprobs_num": [1, 1], "sampling_params": {"n": 2}},
        {"sampling_params": [{"n": 2}, {}]},
        {"token_ids_logprob": [[5]]},
        {"sampling_params": {"n": 1024}, "text": ["3"] * 17},
    ):
        with pytest.raises(BadRequest):
            accept("/generate", two | wrong)
    accept("/generate", two | {"rid": ["a", "b"], "sampling_params": [SHORT, SHORT], "token_ids_logprob": [5, 6]})
    with pytest.raises(BadRequest, match="under way"):
        accept("/generate", {"text": "3", "rid": "a"}, SERVER._replace(in_use=lambda rid: rid == "a"))


# -- the gate


def through(
    path: str,
    body: bytes,
    answer: bytes = b"",
    stream: bool = False,
    root: str = "",
    tells: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, bytes, dict[str, Any] | None]:
    """Status and body that a client gets, and what SGLang's route was given, if it was reached."""
    given: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []

    async def route(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == body
        given.append(scope[PARSED])
        if tells:
            scope[TOLD].update(tells)
        headers = [] if stream else [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in answer.splitlines(keepends=True) if stream else [answer]:
            await send({"type": "http.response.body", "body": part, "more_body": stream})
        if stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    parts = [{"type": "http.request", "body": body[:7], "more_body": True}, {"type": "http.request", "body": body[7:]}]

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    scope = {"type": "http", "path": root + path, "root_path": root, "method": "POST", "headers": []}
    asyncio.run(Gate(route, server=lambda: SERVER)(scope, receive, send))
    whole = b"".join(each.get("body", b"") for each in sent)
    lengths = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    assert lengths in ([], [len(whole)])
    return sent[0]["status"], whole, given[0] if given else None


def test_what_was_ignored_is_told_in_each_meta_info_and_no_text_is_touched() -> None:
    text = 'he said "meta_info":{"a":1}'
    answer = json.dumps([{"text": text, "meta_info": {"id": "a"}}] * 2, separators=(",", ":")).encode()
    status, body, given = through("/generate", b'{"text":["3","4"],"odd":1}', answer)
    told = [{"text": text, "meta_info": {"ignored": ["odd"], "id": "a"}}] * 2
    assert (status, json.loads(body), given) == (200, told, {"text": ["3", "4"]})
    _, body, _ = through("/generate", b'{"text":["3","4"]}', answer)
    assert body == answer


def test_streams_of_other_dialects_tell_it_at_the_top() -> None:
    answer = b'data: {"id":"data: {"}\n\ndata: [DONE]\n\n'
    _, body, _ = through("/v1/completions", b'{"prompt":"3","odd":1}', answer, stream=True)
    assert body == b'data: {"meta_info":{"ignored":["odd"]},"id":"data: {"}\n\ndata: [DONE]\n\n'


def test_what_a_route_tells_is_at_the_top_of_answers_that_hold_no_meta_info() -> None:
    answer = b'{"id":"a"}'
    _, body, _ = through("/v1/completions", b'{"prompt":"3","odd":1}', answer, tells={"seed": 5})
    assert json.loads(body) == {"meta_info": {"ignored": ["odd"], "seed": 5}, "id": "a"}
    _, body, _ = through("/v1/completions", b'{"prompt":"3"}', answer, tells={"seed": 5})
    assert json.loads(body) == {"meta_info": {"seed": 5}, "id": "a"}
    assert through("/v1/completions", b'{"prompt":"3"}', answer)[1] == answer


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"null", b'{"a"', b"[" * 100_000, b'{"text":"\xff"}', b'{"text":NaN}', b"{}"]
)
def test_what_is_no_request_is_answered_400(body: bytes) -> None:
    status, answer, given = through("/generate", body)
    assert (status, given) == (400, None)
    assert json.loads(answer)["error"]["message"]


def test_a_body_that_is_too_large_is_not_read_to_its_end() -> None:
    assert through("/generate", b" " * (MAX_BODY + 1))[0] == 413


def test_routes_that_are_not_served() -> None:
    assert through("/v1/responses", b"{}")[0] == through("/v1/responses/5/cancel", b"{}")[0] == 404
    assert through("/encode", b'{"text":"3"}')[0] == 400


def test_behind_a_proxy_it_is_the_same_gate() -> None:
    """`--fastapi-root-path` puts its prefix before every path."""
    assert through("/generate", b'{"text":3}', root="/proxied")[0] == 400


def test_names_of_clients_are_bounded() -> None:
    odd = {f"odd_{i}\n" * 50: 1 for i in range(100)}
    answer = b'{"text":"a","meta_info":{"id":"a"}}'
    _, body, _ = through("/generate", json.dumps({"text": "3"} | odd).encode(), answer)
    names = json.loads(body)["meta_info"]["ignored"]
    assert len(names) == MAX_NAMED
    assert all(len(name) <= 64 and name.isprintable() for name in names)
    for i in range(100):
        count_ignored(f"name {i}")
    assert len(_ignored) <= MAX_NAMES + 1


def test_hostile_requests_never_raise() -> None:
    reached = [through_quietly(each.path, each.body) for each in hostile(400, seed=5)]
    assert 0.1 < sum(reached) / len(reached) < 0.6


def through_quietly(path: str, body: bytes) -> bool:
    return through(path, body, b'{"id":"a"}')[2] is not None


def test_a_typical_request_is_checked_in_no_time() -> None:
    body = json.dumps(
        {"input_ids": [5] * 200, "sampling_params": SHORT | {"top_p": 1.0, "top_k": -1}, "rid": "a"}
    ).encode()
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        accept_raw = msgspec.json.decode(body)
        TABLES["/generate"].accept(accept_raw, SERVER)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 1e-4
