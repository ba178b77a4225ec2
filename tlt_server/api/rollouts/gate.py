"""The gate: what a client sends is read once, and refused here where it cannot be served or is not of its schema.

SGLang's routes pass most of a body on to the schedulers, and one that an exception reaches ends with the server. Of a
request for responses, scores or tokens, known fields are passed on and nothing else: what was checked is what is run.
Names of what was ignored are put into the answer: `meta_info.ignored`, on `/generate` within each response's own
`meta_info`, else at the answer's top, where the request's seed is told beside them.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec
from fastapi import Response

from tlt_server.api.auth import path_of
from tlt_server.api.bodies import BODIES
from tlt_server.api.fields.field import Body, Server, Table
from tlt_server.api.fields.routes import EMBEDDING, RESPONSES, TABLES, unserved
from tlt_server.api.rollouts.scope import PARSED, TOLD
from tlt_server.api.scheduler import as_json, tokenizer_manager
from tlt_server.config import ServerConfig
from tlt_server.errors import BadRequest
from tlt_server.metrics import count_ignored

MAX_BODY, MAX_CONTROL = 2**26, 2**24
"""Bytes of a rollout's body: a thousand prompts of eight thousand token ids fit; and of any other."""
HOLD_TENSORS = {"/update_weights_from_tensor"}
"""Of any size."""
MAX_NAMED, MAX_LOGGED = 32, 64
"""Ignored fields that an answer names, and that the log ever does: names are the clients' own."""

log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware around SGLang's routes. server: reads what requests are held against, once it has started.
    tables: of its dialect, by route."""

    def __init__(self, app: Any, server: Callable[[], Server], tables: Mapping[str, Table] = TABLES) -> None:
        self._app, self._read_server, self._tables = app, server, tables
        self._logged: set[str] = set()

    @cached_property
    def _server(self) -> Server:
        return self._read_server()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = path_of(scope).rstrip("/")
        if why := unserved(path):
            await _refuse(404, f"{path} is not served: {why}", scope, receive, send)
        elif scope["type"] != "http" or (path in self._tables and scope["method"] not in ("POST", "PUT")):
            await self._app(scope, receive, send)
        else:
            await self._check(path, scope, receive, send)

    async def _check(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        limit = MAX_BODY if path in self._tables else None if path in HOLD_TENSORS else MAX_CONTROL
        body = await read(receive, limit)
        if body is None:
            return  # the client is gone
        if limit is not None and len(body) > limit:
            await _refuse(413, f"more than {limit} bytes: send it in parts", scope, receive, send)
            return
        try:
            if path not in self._tables:
                require_fit(path, body)
            else:
                scope[PARSED], ignored = self._accept(path, body)
                self._tell(ignored)
                told: dict[str, Any] = {"ignored": ignored} if ignored else {}
                if path in RESPONSES:
                    scope[TOLD] = told
                if told or path in RESPONSES:
                    send = telling(told, path == "/generate", send)
        except BadRequest as error:
            await _refuse(400, str(error), scope, receive, send)
            return
        await self._app(scope, again(body, receive), send)

    def _accept(self, path: str, body: bytes) -> tuple[Body, list[str]]:
        if path in EMBEDDING and "embedding" not in self._server.can:
            raise BadRequest(f"{path}: this server generates, and does not embed")
        try:
            given = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadRequest(f"not JSON: {error}") from error
        except RecursionError as error:
            raise BadRequest("not JSON: nested too deep") from error
        if not isinstance(given, dict):
            raise BadRequest("a request is a JSON object")
        accepted, ignored = self._tables[path].accept(given, self._server)
        return accepted, list(dict.fromkeys(ignored))[:MAX_NAMED]

    def _tell(self, ignored: list[str]) -> None:
        for name in ignored:
            count_ignored(name)
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("requests hold %s, which is ignored (said once)", name)


def require_fit(path: str, body: bytes) -> None:
    """Of a control route. An empty body, and one of our own routes, is left to the route. Raises BadRequest: what is
    wrong with the body, in a line."""
    if not body or path not in BODIES:
        return
    try:
        msgspec.json.decode(body, type=BODIES[path])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path}: {error}") from error


async def _refuse(status: int, message: str, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})
    else:
        await refusal(path_of(scope), status, message)(scope, receive, send)


def refusal(path: str, status: int, message: str) -> Response:
    """An error in the route's own dialect."""
    said = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    if path.startswith("/v1/messages"):
        return as_json({"type": "error", "error": {"type": "invalid_request_error", "message": message}}, status)
    if path.startswith("/v1/"):
        return as_json({"object": "error", **said, "error": said}, status)
    return as_json({"success": False, "message": message, "error": said}, status)


async def read(receive: Any, limit: int | None) -> bytes | None:
    """A request's body, or of one longer than `limit` what shows it; None: the client went before it was whole."""
    parts, size, more = [], 0, True
    while more and (limit is None or size <= limit):
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
    return b"".join(parts) if len(parts) > 1 else parts[0]


def again(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body once more, and then what else comes."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def first_the_body() -> Any:
        return waiting.pop() if waiting else await receive()

    return first_the_body


def telling(told: Mapping[str, Any], within: bool, send: Any) -> Any:
    """A `send` whose answers, and events of a stream, say what is told by then, if anything: `within` each `meta_info`
    that is there, else in one of its own, at the top. SGLang writes JSON without blanks, and a quote within a string
    has a backslash before it: the bytes sought are never of a client's text."""
    mark = b'"meta_info":{' if within else b'{"'
    started: list[Any] = []

    def tell(body: bytes) -> bytes:
        if not told:
            return body
        fields = msgspec.json.encode(told)
        if within:
            return body.replace(mark, mark + fields[1:-1] + b",")
        at = body.find(b"data: {") + 6 if b"data: {" in body and not body.startswith(b"{") else 0
        if not body.startswith(mark, at):
            return body
        return body[:at] + b'{"meta_info":' + fields + b',"' + body[at + len(mark) :]

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
            return
        if message["type"] == "http.response.body":
            body = tell(message.get("body", b""))
            if started:
                start = started.pop()
                if not message.get("more_body", False):
                    start["headers"] = [
                        (name, str(len(body)).encode() if name.lower() == b"content-length" else value)
                        for name, value in start["headers"]
                    ]
                await send(start)
            message = {**message, "body": body}
        await send(message)

    return sending


def read_server() -> Server:
    """What this server's requests are held against."""
    manager = tokenizer_manager()
    # override: drafts lie beyond the context in rows that are wide enough; upstream takes them off every request's
    manager.num_reserved_tokens = 0
    args, model = manager.server_args, manager.model_config
    able = {
        "plain": args.speculative_algorithm is None,
        "lora": args.enable_lora,
        "multimodal": model.is_multimodal,
        "embeds": args.disable_radix_cache,
        "states": args.enable_return_hidden_states or args.return_hidden_states_mode is not None,
        "experts": args.enable_return_routed_experts,
        "indexer": args.enable_return_indexer_topk,
        "thinking": args.enable_strict_thinking,
        "reasoning": args.reasoning_parser,
        "embedding": not manager.is_generation,
        "suffixes": args.completion_template,
    }
    return Server(
        vocab=model.vocab_size,
        context=manager.context_len,
        hidden=model.hidden_size,
        replicas=args.dp_size,
        can=frozenset(name for name, can in able.items() if can),
        labels=frozenset(args.tokenizer_metrics_allowed_custom_labels or ()),
        strict=ServerConfig.from_environment().strict_fields,
        in_use=lambda rid: rid in manager.rid_to_state or rid in manager.logical_rid_to_child_rids,
    )
