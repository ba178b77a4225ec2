"""vLLM's weight transfer over HTTP: `init`, then for each target `start`, `update` once or more, `finish`.

    NONE ── init ──▶ READY ── start ──▶ OPEN ── update ──▶ OPEN ── finish ──▶ READY

The schedulers keep the state (engine/transfer); these routes ask them to begin something, and then how far it is, until
it is over or the trainer has sent nothing for `transfer_timeout_s`.
"""

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.runtime_context import get_server_args

from tlt_server.api.scheduler import ask, body, tokenizer_manager
from tlt_server.api.vllm import pauses
from tlt_server.api.vllm.edge import control
from tlt_server.config import ServerConfig
from tlt_server.engine import messages
from tlt_server.engine.messages import Progress
from tlt_server.engine.transfer.asked import Finish, Init, Update, UpdateInfo
from tlt_server.errors import BadRequest

router = APIRouter()

TURN_S = 0.02
"""Between two questions how far it is, while nothing comes; the schedulers have other things to do."""


class Call(msgspec.Struct):
    """Of `/collective_rpc`; only methods of SkyRL's weight transfer are called."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


@control(router, "/init_weight_transfer_engine")
async def init(request: Request) -> Any:
    """Joins the trainer's group; another one ends first, with what was open in it. 400: who is there sends nothing that
    can be joined, or nobody is there in time."""
    args = get_server_args()
    if args.pp_size > 1:
        raise BadRequest("weight transfer: not served by a server of several pipeline stages")
    await ask((await body(request, Init)).init_info.asked())
    progress = await _over()
    if progress.failed is not None:
        raise BadRequest(f"no weight transfer with this trainer: {progress.failed}")
    return {"message": "Weight transfer initialized"}


@control(router, "/shutdown_weight_transfer_engine")
async def shutdown(_request: Request) -> Any:
    await ask(messages.Leave())
    return {"message": "Weight transfer ended"}


@control(router, "/start_weight_update")
async def start(_request: Request) -> Any:
    """Opens an update; where nobody has paused generation, it is, in place, until the update has ended well."""
    await begin()
    return {"message": "Weight update started"}


async def begin() -> None:
    paused = tokenizer_manager().is_pause
    if not paused:
        await pauses.hold(request=None)
    try:
        await ask(messages.Open(held=not paused))
    except HTTPException:
        if not paused:
            await pauses.go_on(request=None)
        raise


@control(router, "/start_draft_weight_update")
async def start_draft(_request: Request) -> Any:
    raise BadRequest("drafters are updated by POST /tlt/v1/drafter/update, or by tlt-server train")


@control(router, "/update_weights")
async def update(request: Request) -> Any:
    """Receives and writes. 409: what came does not fit, and nothing of it is kept; or it stopped in the middle, and the
    target is incomplete until a whole one was sent."""
    given = await body(request, Update)
    if given.weight_dir is not None:
        await _from_disk(given.weight_dir)
    elif given.update_info is not None:
        await receive(given.update_info)
    else:
        raise BadRequest("give update_info, or weight_dir")
    return {"message": "Weights updated"}


async def receive(info: UpdateInfo) -> None:
    await ask(info.asked())
    progress = await _over()
    if progress.failed is not None:
        raise HTTPException(409, progress.failed)


async def _from_disk(folder: str) -> None:
    manager = tokenizer_manager()
    success, message, _ = await manager.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path=folder, flush_cache=False)
    )
    if not success:
        raise HTTPException(409, message)


@control(router, "/finish_weight_update")
async def finish(request: Request) -> Any:
    """Ends the update: from now on its weights sample. 409: it failed, or lacks tensors."""
    await end((await body(request, Finish)).weight_version)
    return {"message": "Weight update finished"}


async def end(weight_version: str | None) -> None:
    """A hold of ours ends with it, unless the target is incomplete by then."""
    (progress, *_) = [answer.progress for answer in await ask(messages.Advance())]
    try:
        await ask(messages.Close(weight_version))
    except HTTPException as refused:
        raise HTTPException(409, refused.detail) from refused
    finally:
        if progress and progress.held and not await pauses.torn():
            await pauses.go_on(request=None)


@control(router, "/collective_rpc")
async def collective_rpc(request: Request) -> Any:
    """vLLM calls any method of its workers by name; here the names are SkyRL's."""
    call = await body(request, Call)
    match call.method:
        case "skyrl_start_weight_update":
            await begin()
        case "update_weights_nccl":
            await receive(_converted(call.kwargs))
        case "skyrl_finish_weight_update":
            await end(None)
        case "liveness_probe":
            pass
        case _:
            raise BadRequest(
                f"collective_rpc: method {call.method!r} is not served; weights come by update_weights_nccl"
            )
    args = get_server_args()
    return {"results": [None] * (args.tp_size * args.pp_size * args.dp_size)}


@router.post("/init_broadcaster")
async def init_broadcaster() -> Response:
    """prime-rl goes on without where there is none."""
    return Response(status_code=404)


def _converted(kwargs: dict[str, Any]) -> UpdateInfo:
    try:
        return msgspec.convert(kwargs.get("update_info"), UpdateInfo)
    except msgspec.ValidationError as error:
        raise BadRequest(f"update_info: {error}") from error


async def _over() -> Progress:
    """How it went: what was begun last is over on all ranks of all replicas. Ends it where nothing moves any more."""
    limit = ServerConfig.from_environment().transfer_timeout_s
    until = time.monotonic() + limit
    while True:
        all_of_them = [answer.progress for answer in await ask(messages.Advance()) if answer.progress]
        if not any(progress.working for progress in all_of_them):
            return next((progress for progress in all_of_them if progress.failed is not None), all_of_them[0])
        if any(progress.moved for progress in all_of_them):
            until = time.monotonic() + limit
        elif time.monotonic() > until:
            await ask(messages.Leave(f"the trainer has sent nothing for {limit:g} s"))
        else:
            await asyncio.sleep(TURN_S)
