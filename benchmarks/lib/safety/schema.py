"""Requests by a server's own OpenAPI document, such as fit it and such as do not, as schemathesis makes them."""

import contextlib
import json
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from benchmarks.lib.safety.odd import Case

SLOW = {"/v1/completions", "/v1/chat/completions", "/invocations"}
"""What does not fit their schemas takes seconds a case to draw; `bodies.py` has such."""


def cases_of(url: str, examples: int, number: int) -> list[Case]:
    """`examples` that fit each operation and, but for `SLOW`, as many that do not; drawn from the seed `number`."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", timeout=30).raise_for_status().json())
    found: list[Case] = []
    for operation in (each.ok() for each in schema.get_all_operations()):
        takes = operation.body or operation.query or operation.path_parameters
        both = takes and operation.path not in SLOW
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if both else (GenerationMode.POSITIVE,)
        for mode in modes:
            _draw(operation.as_strategy(generation_mode=mode), examples, number, found)
    return found


def _draw(strategy: Any, examples: int, number: int, found: list[Case]) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=strategy)
    def keep(drawn: Any) -> None:
        found.append(_as_case(drawn))

    with contextlib.suppress(Unsatisfiable):  # whatever is sent fits an operation that says nothing of what it takes
        keep()


def _as_case(drawn: Any) -> Case:
    asked = drawn.as_transport_kwargs(base_url="http://server")
    url = httpx.Request(asked["method"], asked["url"], params=asked["params"]).url
    body = asked.get("data") if "json" not in asked else json.dumps(asked["json"]).encode()
    kind = asked["headers"].get("Content-Type", "")
    return Case(asked["method"], url.raw_path.decode(), body if isinstance(body, bytes) else b"", kind)
