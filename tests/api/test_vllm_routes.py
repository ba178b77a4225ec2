"""The routes of vLLM's dialect: there in that dialect alone, before SGLang's, behind the gate and the keys."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.api.test_fields import SERVER
from tlt_server.api.app import add_routes
from tlt_server.api.fields.routes import VLLM_TABLES, tables_of
from tlt_server.api.rollouts.gate import Gate
from tlt_server.api.rollouts.scope import PARSED
from tlt_server.api.vllm.serving import UNDER_WAY, under_way
from tlt_server.config import Dialect

ADMINS = {"/abort_requests", "/inference/v1/abort_requests", "/load_lora_adapter"}
ADMINS |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


def paths(dialect: Dialect) -> dict[str, Any]:
    """What answers each path first."""
    app = FastAPI()
    add_routes(app, dialect)
    found: dict[str, Any] = {}
    for route in app.routes:
        found.setdefault(getattr(route, "path", ""), route)
    return found


def test_routes_are_there_in_vllms_dialect_alone() -> None:
    added = set(paths(Dialect.VLLM)) - set(paths(Dialect.SGLANG))
    assert added >= {*VLLM_TABLES, *ADMINS}
    assert set(tables_of(Dialect.VLLM)) - set(tables_of(Dialect.SGLANG)) == {"/inference/v1/generate"}


@pytest.mark.parametrize("path", sorted({*VLLM_TABLES, *ADMINS}))
def test_what_changes_the_server_asks_for_the_admin_key(path: str) -> None:
    from sglang.srt.utils.auth import AuthLevel

    level = getattr(paths(Dialect.VLLM)[path].endpoint, "_auth_level", AuthLevel.NORMAL)
    assert level is (AuthLevel.ADMIN_OPTIONAL if path in ADMINS else AuthLevel.NORMAL)


def through(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any] | None]:
    """Status and answer that a client gets of a route that answers `{"a": 1}`, and what the route was given."""
    given: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []

    async def route(scope: Any, _: Any, send: Any) -> None:
        given.append(scope[PARSED])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"a":1}'})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    gate = Gate(route, server=lambda: SERVER, tables=tables_of(Dialect.VLLM))
    scope = {"type": "http", "path": path, "root_path": "", "method": "POST", "headers": []}
    asyncio.run(gate(scope, receive, send))
    return sent[0]["status"], json.loads(sent[-1]["body"]), given[0] if given else None


def test_the_gate_reads_vllms_fields() -> None:
    asked = {"token_ids": [5], "sampling_params": {"seed": 1, "top_k": 0, "stop": None, "odd": 1}}
    status, answer, given = through("/inference/v1/generate", asked)
    assert (status, answer) == (200, {"meta_info": {"ignored": ["odd"]}, "a": 1})
    assert given == {"token_ids": [5], "sampling_params": {"seed": 1, "top_k": 0}}
    status, answer, given = through("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_k": -2}})
    assert (status, given) == (400, None)
    assert answer["error"]["message"].startswith("sampling_params.top_k: -2")
    assert through("/v1/completions", {"prompt": "3", "prompt_logprobs": 1})[0] == 200


def test_requests_are_known_by_their_names_while_they_are_under_way() -> None:
    with under_way({"a", "header"}, ["a_0", "a_1"]):
        with under_way({"header"}, ["b"]), under_way({"a"}, ["a_0"]):
            assert UNDER_WAY == {"a": ["a_0", "a_1", "a_0"], "header": ["a_0", "a_1", "b"]}
        assert UNDER_WAY == {"a": ["a_1", "a_0"], "header": ["a_0", "a_1"]}
    assert UNDER_WAY == {}
