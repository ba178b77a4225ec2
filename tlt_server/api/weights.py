"""The HTTP routes around publications of the target: SGLang 0.5.23's sessions, the name of a version, the events."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Request, Response
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.utils.auth import AuthLevel, auth_level
from tlt_client.schemas import TargetShare

from tlt_server.api.scheduler import as_json, ask, body, tell, tokenizer_manager
from tlt_server.engine import messages

router = APIRouter()

IDLE_S = 0.2
"""How long a scheduler may take to be done with requests that it has answered."""
SHARING_S = 60.0
"""How long writing may take before its caller is told that it is not over."""
PAUSE_S = 0.01

_switching = asyncio.Lock()
_reading = asyncio.Lock()


def disk_updates() -> asyncio.Lock:
    """Held by the one update from disk that this process waits for: their answers carry no name."""
    return _reading


async def _in_turn(calling: Coroutine[Any, Any, Any], turn: AbstractAsyncContextManager[Any]) -> Any:
    """What a call of upstream's answers. It goes on to its end if its caller goes away: else its answer would be taken
    for the next one's, or end the server."""

    async def in_turn() -> Any:
        async with turn:
            return await calling

    return await asyncio.shield(asyncio.ensure_future(in_turn()))


async def _as_upstream(asking: Coroutine[Any, Any, Any], message: str) -> Response:
    """An answer of the shape that SGLang's update routes have: 400 where it is refused."""
    try:
        await asking
    except HTTPException as error:
        if error.status_code not in (400, 409):
            raise
        return as_json({"success": False, "message": error.detail}, 400)
    return as_json({"success": True, "message": message})


@router.post("/begin_weight_update")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def begin_weight_update(
    selector: Annotated[str | None, Body(embed=True)] = None,
    allow_partial: Annotated[bool, Body(embed=True, strict=True)] = False,
) -> Response:
    """Opens a publication of the target that `/end_weight_update` closes. One that may be partial leaves active
    what it does not carry."""
    return await _as_upstream(ask(messages.Begin(selector, allow_partial)), "A weight update is open.")


@router.post("/end_weight_update")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def end_weight_update() -> Response:
    """Closes it: the target's version grows, if anything was written. 400 where that was not the whole target."""
    return await _as_upstream(ask(messages.End()), "The weight update is complete.")


# Routes of upstream's with the same answers: registered before SGLang's own, they take their place.


@router.post("/pause_generation")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def pause_generation(obj: Annotated[PauseGenerationReqInput, Body()], request: Request) -> Any:
    """The scheduler never learns of a pause that aborts, which is the default, though what is written until generation
    continues is one publication. And a tokenizer worker that was asked nothing yet would wait for ever."""
    from sglang.srt.entrypoints import http_server

    tokenizer_manager().auto_create_handle_loop()
    if obj.mode == "abort":
        tell(messages.Pausing())
    return await _in_turn(http_server.pause_generation(obj, request), _switching)


@router.post("/continue_generation")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def continue_generation(obj: Annotated[ContinueGenerationReqInput, Body()], request: Request) -> Any:
    """Here too a tokenizer worker that was asked nothing yet would wait for ever. 400 where what was written since the
    pause was not the whole target: generation continues with it."""
    from sglang.srt.entrypoints import http_server

    tokenizer_manager().auto_create_handle_loop()
    ended = await _as_upstream(ask(messages.Continuing()), "")
    answer = await _in_turn(http_server.continue_generation(obj, request), _switching)
    return answer if ended.status_code == 200 else ended


@router.post("/update_weights_from_disk")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def update_weights_from_disk(obj: Annotated[UpdateWeightFromDiskReqInput, Body()], request: Request) -> Any:
    """The answer to one whose caller has gone would end the server."""
    from sglang.srt.entrypoints import http_server

    return await _in_turn(http_server.update_weights_from_disk(obj, request), nullcontext())


@router.get("/get_weight_version")
@router.get("/weight_version")
async def get_weight_version() -> Response:
    """Upstream's refuses, where trainers still ask. What it was called before it did, and is again in SGLang 0.5.23.
    Some ask before generation continues, whether what they sent has arrived."""
    answers = await ask(messages.ReadVersions())
    return as_json({"weight_version": answers[0].weight_version})


@router.post("/update_weight_version")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def update_weight_version(obj: Annotated[UpdateWeightVersionReqInput, Body()], request: Request) -> Any:
    """Upstream tells its own process alone; the tokens are credited in the scheduler."""
    from sglang.srt.entrypoints import http_server

    answer = await http_server.update_weight_version(obj, request)
    if answer.status_code == 200:
        await ask(messages.Name(obj.new_version))
    return answer


@router.post("/release_memory_occupation")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def release_memory_occupation(tags: Annotated[list[str] | None, Body(embed=True)] = None) -> None:
    """Offloads GPU memory: `kv_cache`, `weights`, `cuda_graph`, or all. Upstream's ends the server where it
    should refuse. All replicas do, or none. 409: requests are running or waiting, and generation is not paused."""
    until = time.monotonic() + IDLE_S
    try:
        while not await _all_hold(tags, last=time.monotonic() > until):
            await asyncio.sleep(IDLE_S / 20)
        await ask(messages.Release(tags))
    finally:
        await ask(messages.Hold(False))


async def _all_hold(tags: list[str] | None, *, last: bool) -> bool:
    """Whether no replica runs a step any more; raises why, the `last` time."""
    try:
        await ask(messages.Hold(True, tags))
    except HTTPException as refused:
        if refused.status_code != 409 or last:
            raise
        await ask(messages.Hold(False))
        return False
    return True


@router.post("/resume_memory_occupation")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def resume_memory_occupation(tags: Annotated[list[str] | None, Body(embed=True)] = None) -> None:
    """Takes it back; what of it was never released is left alone."""
    await ask(messages.Resume(tags))


@router.post("/tlt/v1/target/share")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def share(request: Request) -> Response:
    """Writes what drafters share with the target to a folder, and answers when it is whole: the client's
    `SharedTarget`.

    400: it cannot be written. 409: the target is being written, or was meanwhile. 504: not written in time.
    """
    wanted = await body(request, TargetShare)
    if not Path(wanted.path).is_absolute():
        raise HTTPException(
            400, f"path {wanted.path!r} must be absolute: it is a folder to make on the server's machine"
        )
    until = time.monotonic() + SHARING_S
    while not (shared := [answer.shared for answer in await ask(messages.Share(wanted.path)) if answer.shared]):
        if time.monotonic() > until:
            raise HTTPException(504, f"{wanted.path} is not written after {SHARING_S:.0f} s")
        await asyncio.sleep(PAUSE_S)
    return as_json(shared[0])


@router.get("/tlt/v1/events")
async def events(after: int = 0) -> Response:
    """What happened after the event of this number, oldest first: a list of the client's `Event`."""
    answers = await ask(messages.ReadEvents(after))
    found = [event for answer in answers for event in answer.events or []]
    return as_json(sorted(found, key=lambda event: event.time))
