"""Bodies that no client should send: a valid one with a value replaced, a field added or dropped, or no JSON at all."""

import copy
import json
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Case:
    """One hostile request."""

    method: str
    path: str
    body: bytes
    content_type: str = "application/json"


NUMBERS = (0, -1, 1, 2, 0.5, -0.5, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308)
UNBOUNDED = (float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    " ",
    "a",
    "\x00",
    "\ud800",
    "x" * 5000,
    "../../etc/passwd",
    "NaN",
    "1",
    "é\u2028\U0001f600",
    "[a-",
    "(" * 300,
)
SHAPES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    [[]],
    [None],
    [[], [1]],
    {},
    {"": {}},
    {"a": [None]},
    [1, "a"],
    [[1], 2],
)
ODD = (*NUMBERS, *UNBOUNDED, *TEXTS, *SHAPES)
DEPTHS = (60, 3000)

NO_JSON = (
    b"",
    b"\x00",
    b"\xff\xfe{",
    b"{",
    b'{"a": 1,}',
    b"null",
    b"[]",
    b"[{}]",
    b'"text"',
    b"0",
    b"true",
    b"{}{}",
    b'{"rid": 1e999}',
    b'{"a": 1, "a": [2]}',
    *(b"[" * depth for depth in DEPTHS),
    *(b'{"a":' * depth + b"1" + b"}" * depth for depth in DEPTHS),
)


def odd_body(valid: dict[str, Any], fields: list[str], random: Random) -> bytes:
    """One body.

    Args:
        valid: an object that the route takes.
        fields: names that it knows, beside those of `valid`.
    """
    if random.random() < 0.1:
        return random.choice(NO_JSON)
    body = copy.deepcopy(valid)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _mutate(body, fields, random)
    return json.dumps(body).encode()


def _mutate(body: dict[str, Any], fields: list[str], random: Random) -> None:
    holder, key = random.choice(_places(body)) if body else (body, "a")
    kind = random.random()
    if kind < 0.35 and fields:
        body[random.choice(fields)] = odd(random)
    elif kind < 0.8:
        holder[key] = odd(random)
    elif kind < 0.9 and body:
        del body[random.choice(list(body))]
    else:
        holder[key] = random.choice(([1, "a", None], {"a": copy.deepcopy(body.get(key))}))


def odd(random: Random) -> Any:
    """A value; now and then one within another."""
    value = random.choice(ODD)
    if random.random() < 0.15:
        value = random.choice(([value], [value, 1], {"a": value}, {"0": value}, [[value]]))
    return copy.deepcopy(value)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Where a value stands: every (object or list, key or index) of a tree."""
    places = []
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        places += [(node, key), *_places(value)]
    return places
