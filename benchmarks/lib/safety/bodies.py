"""Hostile requests: legal bodies of every route that takes one, with odd values in odd places, and bytes that are no
JSON. Drawn from a seed; many are legal, so that both sides of the gate are seen."""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tlt_server.api.fields.field import Table
from tlt_server.api.fields.foreign import FOREIGN
from tlt_server.api.fields.native import SAMPLING
from tlt_server.api.fields.routes import TABLES, UNSERVED


class Hostile(NamedTuple):
    """A request."""

    path: str
    body: bytes


SHORT = {"max_new_tokens": 4, "temperature": 0}
CHAT = [{"role": "user", "content": "What is 3*4?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LEGAL: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": "What is 3*4?\n", "sampling_params": SHORT},
        {"input_ids": [5, 6, 7], "sampling_params": SHORT, "return_logprob": True, "top_logprobs_num": 2},
        {"text": ["3*4", "5*6"], "sampling_params": [SHORT, SHORT], "rid": ["a", "b"]},
        {"input_ids": [[5, 6], [7]], "sampling_params": {**SHORT, "n": 2}, "logprob_start_len": 0},
        {"text": "3*4", "sampling_params": {**SHORT, "temperature": 1, "top_p": 0.9, "stop": "9"}, "stream": True},
        {"text": "3*4", "sampling_params": {**SHORT, "logit_bias": {"5": 1}, "stop_token_ids": [9], "regex": "[0-9]+"}},
        {"text": "3*4", "sampling_params": {**SHORT, "json_schema": '{"type": "object"}', "custom_params": {"a": 1}}},
    ],
    "/v1/completions": [
        {"prompt": "3*4", "max_tokens": 4, "temperature": 0},
        {"prompt": ["3*4", "5*6"], "max_tokens": 4, "logprobs": 2, "n": 2, "echo": True},
        {"prompt": [[5, 6], [7]], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "3", "max_tokens": 4, "response_format": {"type": "json_object"}, "return_token_ids": True},
    ],
    "/v1/chat/completions": [
        {"messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        {"messages": CHAT, "max_completion_tokens": 4, "tools": [TOOL], "tool_choice": "auto"},
        {"messages": [{"role": "system", "content": "s"}, *CHAT], "max_tokens": 4, "stream": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "3"}]}], "max_tokens": 4},
        {"messages": CHAT, "max_tokens": 4, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
    ],
    "/v1/messages": [{"model": "m", "messages": CHAT, "max_tokens": 4, "stop_sequences": ["9"]}],
    "/v1/messages/count_tokens": [{"model": "m", "messages": CHAT}],
    "/v1/score": [{"query": "3*4=", "items": ["12", "13"], "label_token_ids": [5, 6]}],
    "/v1/rerank": [{"query": "3*4", "documents": ["12", "13"]}],
    "/tokenize": [{"prompt": "3*4"}, {"messages": CHAT}],
    "/detokenize": [{"tokens": [5, 6, 7]}, {"tokens": [[5], [6]]}],
    "/encode": [{"text": "3*4"}],
    "/classify": [{"text": "3*4"}],
    "/v1/embeddings": [{"input": "3*4", "model": "m"}],
}
WEIGHTS = {"/generate": 12, "/v1/completions": 5, "/v1/chat/completions": 5}
NUMBERS = (
    *(0, 1, -1, 2, 511, 512, 2048, 2049, 65_537, 2**30, 2**30 + 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1),
    *(
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        2**64,
        10**30,
        0.5,
        1.0,
        -0.0,
        1.5,
        5e-324,
        1e-7,
        1e6,
        1e30,
        3.5e38,
        1e308,
        -1e30,
    ),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    "",
    "a",
    "5",
    "-1",
    "null",
    "NaN",
    "true",
    "\x00",
    "\ud800",
    "é" * 9,
    "a" * 5000,
    "{",
    "[",
    "(",
    "HEALTH_CHECK_1",
    "\\",
)
PATTERNS = (
    *("(a+)+$", "(a|a)*b", "((((a{99}){99}){99}){99})", "a{999999999}", "(?P<a>x)(?P=a)*", "[", "(" * 200 + ")" * 200),
    *(
        "root ::= root",
        "root ::= a{9999999}",
        'root ::= "a" root | "b"',
        "[0-9]{1,3}",
        "(?=a)*",
        "\\d+|x",
        "(?i)a",
        "^$",
    ),
)
SCHEMAS = (
    *("{}", "[]", "1", "true", '{"type": "array", "maxItems": 1000000000}', '{"type": "string", "pattern": "("}'),
    *('{"$ref": "#"}', '{"type": "nonsense"}', '{"enum": []}', '{"allOf": [{"$ref": "#"}]}', '{"const": null}'),
    '{"items":' * 200 + "{}" + "}" * 200,
    '{"type": "integer", "minimum": 5, "maximum": 1}',
)
FITTING: dict[str, tuple[Any, ...]] = {
    "regex": ("[0-9]+", "(a|b){1,3}"),
    "stop_regex": ("[0-9]{2}", "a+"),
    "ebnf": ('root ::= "a" | "b"',),
    "json_schema": ('{"type": "integer"}',),
    "stop": ("9", ["\n", "1"], []),
    "stop_token_ids": ([1, 511], []),
    "temperature": (0, 1e-7, 0.7, 1e6),
    "top_k": (-1, 1, 5, 2**30),
    "top_p": (0.1, 1, 1e-30),
    "min_p": (0, 0.5, 1),
    "n": (1, 2, 3),
    "max_new_tokens": (0, 1, 12),
    "max_tokens": (1, 12),
    "min_new_tokens": (0, 3),
    "min_tokens": (0, 3),
    "logit_bias": ({"5": 1e30}, {"5": -1e30, "511": 1}, {}),
    "rid": ("mine",),
    "logprob_start_len": (-1, 0, 2, 9999),
    "top_logprobs_num": (0, 3, 512),
    "token_ids_logprob": ([0, 511], []),
    "return_logprob": (True, False),
    "return_text_in_logprobs": (True,),
    "return_flat_raw_top_logprobs": (True,),
    "custom_params": ({"a": [1, "b", None], "b": {"c": 1.5}},),
    "sampling_seed": (0, 2**63 - 1),
    "seed": (0, -1),
    "priority": (0, 2**31 - 1),
    "extra_key": ("a",),
    "cache_salt": ("a",),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "tools": ([TOOL],),
    "tool_choice": ("none", "required", {"type": "function", "function": {"name": "f"}}),
    "bootstrap_room": (2**63 - 1,),
    "routed_dp_rank": (0,),
    "session_id": ("a",),
}
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        [],
        [[]],
        [None],
        [1],
        [1.5],
        ["a"],
        [[1], [2]],
        [[1], 2],
        [True],
        [{}],
        [[[1]]],
        [2**63],
        [-1],
    ),
    *(
        {},
        {"a": 1},
        {"1": 1},
        {"1": "x"},
        {"1": None},
        {"99999999": 1.0},
        {"-1": 0},
        {"1": 1e308},
        {"1": [1]},
        {"": ""},
    ),
    *(
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": 5},
        {"type": "structural_tag"},
        {"schema": {"a": 1}},
    ),
    *([5] * 3000, ["a"] * 600, {str(i): 1.0 for i in range(600)}, ["3*4"] * 3, [SHORT, {}], [{"n": 2}, {"n": 3}]),
)


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def hostile(count: int, seed: int) -> Iterator[Hostile]:
    """As many requests, the same ones for the same seed."""
    rng = random.Random(seed)
    paths = [path for path in LEGAL for _ in range(WEIGHTS.get(path, 1))]
    for _ in range(count):
        path = rng.choice(paths)
        body = json.loads(json.dumps(rng.choice(LEGAL[path])))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            _spoil(body, TABLES[path], rng)
        raw = json.dumps(body).encode()
        yield Hostile(rng.choice(list(UNSERVED)) if rng.random() < 0.01 else path, _scramble(raw, rng))


def _spoil(body: dict[str, Any], table: Table, rng: random.Random) -> None:
    """Puts an odd value somewhere, or takes one away."""
    params = body.get("sampling_params")
    inside = isinstance(params, dict | list) and rng.random() < 0.6
    if inside:
        target = params if isinstance(params, dict) else rng.choice(params or [{}])
        if isinstance(target, dict):
            _set(target, SAMPLING, rng)
    elif rng.random() < 0.1 and body:
        body.pop(rng.choice(list(body)))
    elif rng.random() < 0.15 and body:
        name = rng.choice(list(body))
        body[name] = _within(body[name], rng)
    else:
        _set(body, table, rng)


def _set(target: dict[str, Any], table: Table, rng: random.Random) -> None:
    names = list(table.fields)
    name = rng.choice(names if rng.random() < 0.9 else [*FOREIGN, "nobody_knows"])
    target[name] = _value(name, rng)


def _value(name: str, rng: random.Random) -> Any:
    if name in FITTING and rng.random() < 0.4:
        return rng.choice(FITTING[name])
    fitting = {"regex": PATTERNS, "stop_regex": PATTERNS, "ebnf": PATTERNS, "json_schema": SCHEMAS}
    if name in fitting and rng.random() < 0.8:
        return rng.choice(fitting[name])
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    if kind < 0.6:
        return rng.choice(TEXTS)
    if kind < 0.95:
        return rng.choice(ODD)
    return deep(rng.choice((2, 40, 500)))


def _within(value: Any, rng: random.Random) -> Any:
    """The value with something odd in its place, or in one of its parts."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        return {**value, name: _within(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _within(value[at], rng), *value[at + 1 :]]
    return _value("", rng)


def _scramble(raw: bytes, rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.02:
        return raw[: rng.randrange(len(raw))]
    if kind < 0.03:
        return bytes(rng.randrange(256) for _ in range(30))
    if kind < 0.04:
        return rng.choice(
            (b"", b"null", b"[]", b'"a"', b"5", b"{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 5000)
        )
    if kind < 0.05:
        return raw.replace(b"3*4", b"\xff\xfe")
    return raw
