"""Routes that change a server ask for SGLang's admin key where one is set; those that only tell do not."""

import asyncio
import re

import httpx
import pytest
from fastapi import FastAPI

from tlt_server.watch.page import FILES


@pytest.fixture(scope="module")
def app() -> FastAPI:
    from tlt_server.api.app import add_routes

    app = FastAPI()
    add_routes(app)
    return app


READ = {
    "/health",
    "/health_generate",
    "/metrics",
    "/get_weight_version",
    "/weight_version",
    "/parallelism_config",
    "/server_info",
    "/get_server_info",
    "/tlt/v1/status",
    "/tlt/v1/events",
    "/tlt/v1/drafter",
    "/tlt/v1/strategy",
    "/tlt/v1/strategy/learned",
    "/tlt/v1/strategy/step_times",
    "/tlt/v1/history",
}
PARSE = {"/parse_function_call", "/separate_reasoning"}
"""Posted to, for what they are told is long."""


def test_what_changes_a_server_asks_for_the_admin_key(app: FastAPI) -> None:
    from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope

    reading = set()
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            level = _get_auth_level_from_app_and_scope(app, {"type": "http", "method": method.upper(), "path": path})
            assert level == (AuthLevel.NORMAL if method == "get" or path in PARSE else AuthLevel.ADMIN_OPTIONAL), path
            if method == "get":
                reading.add(path)
    assert reading == READ | set(FILES)


def test_the_page_needs_no_key_and_what_it_reads_does(app: FastAPI) -> None:
    from tlt_server.api.auth import needed
    from tlt_server.keys import Keys

    def asked(path: str) -> str | None:
        return needed(app, {"type": "http", "method": "GET", "path": path, "headers": []}, Keys("client", "admin"))

    assert {asked(path) for path in (*FILES, "/tlt")} == {None}
    reads = ("/tlt/v1/status", "/tlt/v1/strategy", "/tlt/v1/events", "/tlt/v1/fleet", "/tlt/none.js")
    assert {asked(path) for path in reads} == {"client"}


def test_the_page_comes_with_its_policy(app: FastAPI) -> None:
    from tlt_server.watch.page import HEADERS

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return [await http.get(path) for path in FILES]

    for (file, kind), answer in zip(FILES.values(), asyncio.run(answers()), strict=True):
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, file.read_bytes(), kind)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


CLIENTS = [
    "/",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/tags",
    "/classify",
    "/close_session",
    "/detokenize",
    "/encode",
    "/generate",
    "/get_load",
    "/get_model_info",
    "/get_server_info",
    "/get_weight_version",
    "/invocations",
    "/is_scaling_elastic_ep",
    "/model_info",
    "/open_session",
    "/parse_function_call",
    "/ping",
    "/rerank",
    "/separate_reasoning",
    "/server_info",
    "/tokenize",
    "/v1/audio/transcriptions",
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/loads",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/x",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/x",
    "/v1/responses/x/cancel",
    "/v1/score",
    "/v1/tokenize",
    "/vertex_generate",
    "/weight_version",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
def test_every_route_of_sglangs_asks_for_its_key() -> None:
    """What is not for clients asks for the admin's; a route that an upgrade brings is judged here first."""
    from sglang.srt.entrypoints.http_server import app

    from tlt_server.api.auth import OPEN, needed
    from tlt_server.keys import Keys

    asked = {}
    for template, methods in app.openapi()["paths"].items():
        path = re.sub(r"\{[^}]*\}", "x", template)
        for method in methods:
            scope = {"type": "http", "method": method.upper(), "path": path, "headers": []}
            asked[path, method] = needed(app, scope, Keys("client", "admin"))
            assert needed(app, scope, Keys("client")) == (None if path in OPEN else "client")
            assert needed(app, scope, Keys()) is None
    assert {path for (path, _), key in asked.items() if key is None} <= OPEN
    assert {path for (path, _), key in asked.items() if key == "client"} - set(CLIENTS) == set()
    admin = {path for (path, _), key in asked.items() if key == "admin"}
    assert not admin & set(CLIENTS)
    assert {"/update_weights_from_tensor", "/load_lora_adapter_from_tensors", "/scale_elastic_ep"} <= admin
    websocket = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    assert needed(app, websocket, Keys("client")) == "client"


@pytest.mark.parametrize(
    ("shown", "status"),
    [("Bearer client", 200), ("bearer client", 200), ("Bearer  client", 200)]
    + [
        (each, 401)
        for each in ("", "client", "Basic client", "Bearer clienT", "Bearer", "Bearer \u00e9", "Bearer admin")
    ],
)
def test_a_key_is_compared_whole(shown: str, status: int) -> None:
    from tlt_server.api.auth import Authorization
    from tlt_server.keys import Keys

    app = FastAPI()
    app.add_api_route("/x", lambda: "x")
    app.add_middleware(Authorization, routes=app, keys=Keys("client", "admin"))

    async def asked() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return (await http.get("/x", headers={"Authorization": shown.encode()})).status_code

    assert asyncio.run(asked()) == status
