"""Control routes of upstream's that are answered otherwise: they take the place of SGLang's own, registered before."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from datetime import timedelta
from typing import Annotated, Any

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
from tlt_server.api.rollouts.gate import refusal
from tlt_server.api.scheduler import as_json, tokenizer_manager

router = APIRouter()
logger = logging.getLogger(__name__)

REACHED_S = 30.0
"""How long a trainer may take to open its group after it asked the server to join."""


async def answer_bad_request(request: Request, error: Exception) -> Response:
    """What a route of ours finds wrong with a request."""
    return refusal(path_of(request.scope), 400, str(error))


async def answer_value_error(request: Request, error: Exception) -> Response:
    """SGLang says by a ValueError that a request asks for what cannot be; where a route lets it through: 400 too."""
    logger.info("refused %s: %s", request.url.path, error, exc_info=error)
    return refusal(path_of(request.scope), 400, str(error).split("\n", 1)[0])


@router.post("/init_weights_update_group")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def init_weights_update_group(
    obj: Annotated[InitWeightsUpdateGroupReqInput, Body()], request: Request
) -> Response:
    """A scheduler that joins a group waits for it, and serves nobody meanwhile: the group's store must answer first.
    501: AReaL's `pp_rank`, by which one pipeline stage alone joins."""
    stage, stages = (await request.json()).get("pp_rank"), tokenizer_manager().server_args.pp_size
    if stage is not None and (stages > 1 or stage != 0):
        said = f"pp_rank {stage}, of {stages} pipeline stages: a group of one stage alone is not served"
        return as_json({"success": False, "message": said}, 501)
    if (wrong := await unreachable(obj.master_address, obj.master_port)) is not None:
        return as_json({"success": False, "message": wrong}, 400)
    success, message = await tokenizer_manager().init_weights_update_group(obj)
    return as_json({"success": success, "message": message}, 200 if success else 400)


async def unreachable(host: str, port: int, within_s: float = REACHED_S) -> str | None:
    """Why a group cannot be joined; None once its store answers. torch waits without an end for a peer that accepts and
    says nothing: in a thread that nobody waits for."""
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
        return refusal("/start_profile", 409, str(error))
    return Response("Start profiling.\n")


# Both parse what they are sent as text and touch nothing else: what fails is the text's fault.


@router.post("/parse_function_call")
async def parse_function_call(obj: Annotated[ParseFunctionCallReq, Body()], request: Request) -> Any:
    from sglang.srt.entrypoints import http_server

    return await _parsed(request, http_server.parse_function_call_request(obj, request))


@router.post("/separate_reasoning")
async def separate_reasoning(obj: Annotated[SeparateReasoningReqInput, Body()], request: Request) -> Any:
    from sglang.srt.entrypoints import http_server

    return await _parsed(request, http_server.separate_reasoning_request(obj, request))


async def _parsed(request: Request, parsing: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await parsing
    except Exception as error:
        logger.info("refused text that does not parse", exc_info=True)
        return refusal(path_of(request.scope), 400, f"it does not parse: {type(error).__name__}: {error}")
