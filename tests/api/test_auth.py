"""Routes that change a server ask for SGLang's admin key where one is set; those that only tell do not."""

import pytest
from fastapi import FastAPI


@pytest.fixture(scope="module")
def app() -> FastAPI:
    from tlt_server.api.app import add_routes

    app = FastAPI()
    add_routes(app)
    return app


READ = {
    "/metrics",
    "/tlt/v1/status",
    "/tlt/v1/events",
    "/tlt/v1/drafter",
    "/tlt/v1/strategy",
    "/tlt/v1/strategy/learned",
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
    assert reading == READ
