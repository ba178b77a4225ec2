"""Who may call which route, in every HTTP process: SGLang checks keys in a server of one tokenizer worker alone."""

import hmac
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope
from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.keys import Keys
from tlt_server.watch.page import FILES

OPEN = frozenset({"/health", "/health_generate", "/metrics", "/metrics/", "/tlt", *FILES})
"""Without a key, as in SGLang: an orchestrator's probes and Prometheus show none; nor does a browser, for the page that
asks its user for one."""
CHANGES = frozenset({"/load_lora_adapter_from_tensors", "/scale_elastic_ep", "/set_trace_level"})
"""What changes the server too, though SGLang takes any client's key for it."""


def path_of(scope: Scope) -> str:
    """The path that a route is found by: without what a proxy has put in front (`--fastapi-root-path`)."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Authorization:
    """Middleware that lets nobody through who has not shown the key that a route asks for. routes: the application that
    it is for. keys: None: this process's."""

    def __init__(self, app: ASGIApp, routes: FastAPI, keys: Keys | None = None) -> None:
        self._app, self._routes = app, routes
        self._keys = Keys.from_environment() if keys is None else keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = needed(self._routes, scope, self._keys) if scope["type"] in ("http", "websocket") else None
        if key is not None and not hmac.compare_digest(_shown(scope), key.encode()):
            await _refuse(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def needed(routes: FastAPI, scope: Scope, keys: Keys) -> str | None:
    """The key that a request must show; None: any may pass."""
    path = path_of(scope)
    if path in OPEN or scope.get("method") == "OPTIONS":
        return None
    if path in CHANGES or _get_auth_level_from_app_and_scope(routes, dict(scope)) is not AuthLevel.NORMAL:
        return keys.admin or keys.api
    return keys.api


def _shown(scope: Scope) -> bytes:
    """The bearer token of a request; empty: none."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    scheme, _, token = next((value for name, value in headers if name == b"authorization"), b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


async def _refuse(scope: Any, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
    else:
        await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
