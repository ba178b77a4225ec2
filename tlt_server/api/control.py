"""The door of the control routes: what is not served is said so, and a body is read strictly before SGLang reads it.

A scheduler that an exception reaches ends, and the server with it; SGLang's routes pass most of a body on to it.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Mapping
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Request, Response
from sglang.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    ParseFunctionCallReq,
    ProfileReq,
    SeparateReasoningReqInput,
)
from sglang.srt.utils.auth import AuthLevel, auth_level
from torch.distributed import TCPStore

from tlt_server.api.auth import path_of
from tlt_server.api.bodies import BODIES
from tlt_server.api.fields.routes import TABLES
from tlt_server.api.rollouts.gate import again, read
from tlt_server.api.scheduler import as_json, tokenizer_manager

MAX_BODY = 16 * 2**20
"""Bytes of any body but those that the gate reads, and one that holds tensors."""
HOLD_TENSORS = {"/update_weights_from_tensor"}
logger = logging.getLogger(__name__)

REACHED_S = 30.0
"""How long a trainer may take to open its group after it asked the server to join."""

_EXPERTS = "expert parallelism is not served: no model that speculates here has experts spread over ranks"
_CORPUS = "NGRAM drafting is not served, and so no corpus of its own"
_HICACHE = "the hierarchical cache keeps KV of weights that are gone; it is not changed while the server runs"
_REMOTE = "weights are not sent to other servers: a rendezvous that nobody joins would stop this one"
_SESSION = "a session keeps KV from one request to the next, of weights that may be gone by then"
NOT_SERVED: Mapping[str, str] = {
    "/scale_elastic_ep": _EXPERTS,
    "/is_scaling_elastic_ep": _EXPERTS,
    "/start_expert_distribution_record": _EXPERTS,
    "/stop_expert_distribution_record": _EXPERTS,
    "/dump_expert_distribution_record": _EXPERTS,
    "/add_external_corpus": _CORPUS,
    "/remove_external_corpus": _CORPUS,
    "/list_external_corpora": _CORPUS,
    "/clear_hicache_storage_backend": _HICACHE,
    "/hicache/storage-backend/clear": _HICACHE,
    "/hicache/storage-backend": _HICACHE,
    "/init_weights_send_group_for_remote_instance": _REMOTE,
    "/send_weights_to_remote_instance": _REMOTE,
    "/get_remote_instance_transfer_engine_info": _REMOTE,
    "/remote_instance_transfer_engine_info": _REMOTE,
    "/open_session": _SESSION,
    "/close_session": _SESSION,
    "/load_lora_adapter_from_tensors": "an adapter is loaded from a folder, by /load_lora_adapter: this one unpickles",
    "/slow_down": "it would have the server sleep, for tests of SGLang's own",
    "/stop_profile": "a profile ends after its num_steps",
    "/set_trace_level": "tracing is set at start",
}
"""SGLang's routes that make no sense on this server or cannot be made safe, each with its reason."""
_DUMPER = "tensors are not dumped from a server that strangers reach"


def not_served(path: str) -> str | None:
    """Why a route is not; None where it is. (Those of rollouts: api/fields/routes.py.)"""
    return _DUMPER if path.startswith("/dumper/") else NOT_SERVED.get(path)


async def answer_value_error(request: Request, error: Exception) -> Response:
    """SGLang says by a ValueError that a request asks for what cannot be; where a route lets it through: 400 too."""
    logger.info("refused %s: %s", request.url.path, error, exc_info=error)
    return _refusal(400, str(error).split("\n", 1)[0])


class ControlDoor:
    """ASGI middleware around SGLang's application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = path_of(scope).rstrip("/")
        if (reason := not_served(path)) is not None:
            await _refusal(404, f"{path} is not served: {reason}")(scope, receive, send)
        elif scope["type"] == "http" and path not in TABLES:  # those the gate reads
            await self._read(path, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _read(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        limit = None if path in HOLD_TENSORS else MAX_BODY
        body = await read(receive, limit)
        if body is None:
            return  # the client is gone
        if limit is not None and len(body) > limit:
            await _refusal(413, f"the body is longer than {MAX_BODY} bytes")(scope, receive, send)
        elif (wrong := misfit(path, body)) is not None:
            await _refusal(400, wrong)(scope, receive, send)
        else:
            await self._app(scope, again(body, receive), send)


def misfit(path: str, body: bytes) -> str | None:
    """What is wrong with a body, in a line; None where it fits. An empty one, and one of ours, is left to the route."""
    if not body or path not in BODIES:
        return None
    try:
        msgspec.json.decode(body, type=BODIES[path])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{path}: {error}"
    return None


def _refusal(status: int, message: str) -> Response:
    return as_json({"success": False, "message": message, "error": {"message": message, "code": status}}, status)


# Routes of upstream's with the same answers: registered before SGLang's own, they take their place.

router = APIRouter()


@router.post("/init_weights_update_group")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def init_weights_update_group(obj: Annotated[InitWeightsUpdateGroupReqInput, Body()]) -> Response:
    """A scheduler that joins a group waits for it, and serves nobody meanwhile: the group's store must answer first."""
    if (wrong := await unreachable(obj.master_address, obj.master_port)) is not None:
        return as_json({"success": False, "message": wrong}, 400)
    success, message = await tokenizer_manager().init_weights_update_group(obj)
    return as_json({"success": success, "message": message}, 200 if success else 400)


async def unreachable(host: str, port: int, within_s: float = REACHED_S) -> str | None:
    """Why a group cannot be joined; None once its store answers.

    torch waits without an end for a peer that accepts and says nothing: in a thread that nobody waits for.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str | None] = loop.create_future()

    def answer(wrong: str | None) -> None:
        if not asked.done():
            asked.set_result(wrong)

    def knock() -> None:
        try:
            TCPStore(host, port, None, False, timedelta(seconds=within_s), wait_for_workers=False)
            wrong = None
        except (RuntimeError, ValueError) as error:
            wrong = str(error).splitlines()[0]
        with contextlib.suppress(RuntimeError):  # the server ended meanwhile
            loop.call_soon_threadsafe(answer, wrong)

    threading.Thread(target=knock, daemon=True).start()
    try:
        wrong = await asyncio.wait_for(asked, 2 * within_s)
    except TimeoutError:
        wrong = "who listens there is none"
    return wrong and f"no store of a process group answers at {host}:{port} within {within_s:.0f} s: {wrong}"


@router.post("/start_profile")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def start_profile(obj: Annotated[ProfileReq, Body()]) -> Response:
    """Upstream answers 500 where one is under way."""
    try:
        await tokenizer_manager().start_profile(obj)
    except RuntimeError as error:
        return _refusal(409, str(error))
    return Response("Start profiling.\n")


# Both parse what they are sent as text and touch nothing else: what fails is the text's fault.


@router.post("/parse_function_call")
async def parse_function_call(obj: Annotated[ParseFunctionCallReq, Body()], request: Request) -> Any:
    from sglang.srt.entrypoints import http_server

    return await _parsed(http_server.parse_function_call_request(obj, request))


@router.post("/separate_reasoning")
async def separate_reasoning(obj: Annotated[SeparateReasoningReqInput, Body()], request: Request) -> Any:
    from sglang.srt.entrypoints import http_server

    return await _parsed(http_server.separate_reasoning_request(obj, request))


async def _parsed(parsing: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await parsing
    except Exception as error:
        logger.info("refused text that does not parse", exc_info=True)
        return _refusal(400, f"it does not parse: {type(error).__name__}: {error}")
