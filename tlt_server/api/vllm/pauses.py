"""vLLM's routes that hold generation, empty caches and offload memory, and those that say what the server is."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.runtime_context import get_server_args

from tlt_server.api import weights
from tlt_server.api.rollouts import held
from tlt_server.api.scheduler import ask, body, tokenizer_manager
from tlt_server.api.vllm.edge import control, flag, word
from tlt_server.engine import messages
from tlt_server.errors import BadRequest
from tlt_server.keys import masked

router = APIRouter()

VERSION = "0.33.0"
"""Of vLLM, whose API this is."""
DRAIN_S = 0.05
"""Between two looks whether requests that were to end have."""
MODES = ("abort", "wait", "keep")


class Reset(msgspec.Struct):
    """SkyRL sends in the body what vLLM takes from the query."""

    reset_running_requests: bool | None = None
    reset_external: bool | None = None


class NewVersion(msgspec.Struct):
    new_version: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


# -- generation --


@control(router, "/pause")
async def pause(request: Request) -> Any:
    """abort: what runs ends with what it has. wait: it ends by itself. keep: it goes on after `/resume`. What comes
    meanwhile waits, in all modes."""
    mode = word(request, "mode", "abort", MODES)
    clear_cache = flag(request, "clear_cache", True)
    await _stop(mode, request)
    if clear_cache and mode != "keep":
        await tokenizer_manager().flush_cache()
    return {"status": "paused"}


async def _stop(mode: str, request: Request) -> None:
    if mode == "wait":
        await _drain()
    await hold(request, "abort" if mode == "abort" else "in_place")


async def hold(request: Request | None, mode: str = "in_place") -> None:
    await weights.pause_generation(PauseGenerationReqInput(mode=mode), request)


async def go_on(request: Request | None) -> Any:
    return await weights.continue_generation(ContinueGenerationReqInput(), request)


async def _drain() -> None:
    """Returns when no request runs; new ones wait. As SGLang pauses by aborting, but that nothing is aborted."""
    manager = tokenizer_manager()
    if get_server_args().tokenizer_worker_num > 1:
        raise BadRequest("mode wait: not served with several tokenizer workers; pause with keep or abort")
    async with manager.is_pause_cond:
        # override: SGLang's pauses either abort what runs, or stop it
        manager.is_pause = True
    while await manager.model_update_lock.is_locked():
        if not manager.is_pause:
            raise HTTPException(409, "generation was resumed while this pause waited for requests to end")
        await asyncio.sleep(DRAIN_S)


@control(router, "/resume")
async def resume(request: Request) -> Any:
    """409: the target is incomplete, and would sample what no policy is."""
    if await torn():
        raise HTTPException(409, "an update of the target has not ended, or lacks tensors: send the whole target again")
    answer = await go_on(request)
    if (
        isinstance(answer, Response) and answer.status_code != 200
    ):  # what was written by SGLang's routes since the pause
        raise HTTPException(409, bytes(answer.body).decode())
    return {"status": "resumed"}


async def torn() -> bool:
    """Whether what is active is neither the old target nor a new one."""
    answers = await ask(messages.Advance())
    incomplete = any(answer.versions.target.missing for answer in answers if answer.versions)
    return incomplete or any(answer.progress.writing for answer in answers if answer.progress)


@router.get("/is_paused")
async def is_paused() -> Any:
    return {"is_paused": bool(tokenizer_manager().is_pause)}


@control(router, "/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Any:
    """success: false where requests run, and are neither paused nor to be reset."""
    said = await body(request, Reset)
    if flag(request, "reset_running_requests", bool(said.reset_running_requests)):
        paused = tokenizer_manager().is_pause
        await hold(request, "retract")
        try:
            flushed = await tokenizer_manager().flush_cache()
        finally:
            if not paused:
                await go_on(request)
    else:
        flushed = await tokenizer_manager().flush_cache()
    return {"success": flushed.success}


# -- memory --


@control(router, "/sleep")
async def sleep(request: Request) -> Any:
    """level 0: pauses. 1: gives memory back, and keeps the weights on the CPU. 2: gives all back; the weights are to be
    sent again."""
    level = word(request, "level", "1", ("0", "1", "2"))
    mode = word(request, "mode", "abort", MODES)
    if level == "1" and not get_server_args().enable_weights_cpu_backup:
        raise BadRequest("level 1 keeps the weights: start the server with --enable-weights-cpu-backup, or use level 2")
    await _stop(mode, request)
    if level != "0":
        await weights.release_memory_occupation(None)
    return {"status": "sleeping", "level": int(level)}


@control(router, "/wake_up")
async def wake_up(request: Request) -> Any:
    """Takes memory back: `weights`, `kv_cache`, or all; `scheduling`, or the last of it, lets generation go on."""
    tags = request.query_params.getlist("tags")
    memory = [tag for tag in tags if tag != "scheduling"]
    if memory or not tags:
        await weights.resume_memory_occupation(memory or None)
    asleep = await _offloaded()
    if not asleep:
        await go_on(request)
    return {"status": "sleeping" if asleep else "awake", "tags": tags or None}


@router.get("/is_sleeping")
async def is_sleeping() -> Any:
    return {"is_sleeping": bool(await _offloaded())}


async def _offloaded() -> list[str]:
    return sorted({tag for answer in await ask(messages.ReadVersions()) for tag in answer.offloaded})


# -- what the server is --


@router.get("/liveness")
async def liveness(request: Request) -> Response:
    return await held.health(request)


@router.get("/version")
async def version() -> Any:
    return {"version": VERSION}


@router.get("/get_world_size")
async def get_world_size(include_dp: bool = True) -> Any:
    args = get_server_args()
    return {"world_size": args.tp_size * args.pp_size * (args.dp_size if include_dp else 1)}


@router.get("/weight_info")
async def weight_info() -> Response:
    return await weights.get_weight_version()


@control(router, "/update_weight_version")
async def update_weight_version(request: Request) -> Any:
    """SGLang's aborts what runs, unless it is told not to."""
    name = (await body(request, NewVersion)).new_version
    await weights.update_weight_version(UpdateWeightVersionReqInput(name, abort_all_requests=False), request)
    return {"success": True, "new_version": name}


@router.get("/server_info")
async def server_info(config_format: str = "text") -> Any:
    """SGLang's, and what trainers look for in vLLM's: how weights come, and which law logprobs are of."""
    from sglang.srt.entrypoints import http_server

    info: dict[str, Any] = masked(await http_server.server_info())
    return info | {"vllm_config": _vllm_config()} if config_format == "json" else info


def _vllm_config() -> dict[str, Any]:
    args, model = get_server_args(), tokenizer_manager().model_config
    return {
        "weight_transfer_config": {"backend": "nccl"},
        "model_config": {
            "model": args.served_model_name,
            "dtype": str(model.dtype),
            "max_model_len": tokenizer_manager().context_len,
            # after temperature, as sampled from; with top_k, top_p or min_p before these
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": args.tp_size,
            "pipeline_parallel_size": args.pp_size,
            "data_parallel_size": args.dp_size,
        },
        "lora_config": None,
    }
