"""The HTTP routes of the drafter: which one is active, another one, the one before, none other for now; its trainer.

The route that takes an update leads it through: the schedulers answer each step at once, and are asked again. If this
process dies on the way, the active drafter stays, and the next update overtakes the one that was left.
"""

import asyncio
import time
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils.auth import AuthLevel, auth_level
from tlt_client.schemas import Drafter, DrafterFreeze, DrafterTrainer, DrafterUpdate, DrafterWatchdog

from tlt_server.api.scheduler import as_json, ask, body
from tlt_server.config import Watchfulness, drafter_cache
from tlt_server.drafter.folder import as_served
from tlt_server.engine.messages import Answer, Commit, Freeze, HearTrainer, Offer, ReadVersions, RollBack, SetWatchdog
from tlt_server.errors import ConfigError
from tlt_server.support import drafts_by_own_head

router = APIRouter()

STAGING_S = 120.0
"""How long staging may take before its caller is told that it is not over."""
PAUSE_S = 0.01


def _drafters(answers: list[Answer]) -> list[Drafter]:
    return [answer.versions.drafter for answer in answers if answer.versions and answer.versions.drafter]


@router.get("/tlt/v1/drafter")
async def drafter() -> Response:
    """The client's `Drafter`; under data parallelism that of the first replica."""
    drafters = _drafters(await ask(ReadVersions()))
    if not drafters:
        raise HTTPException(404, "this server was started without a drafter")
    return as_json(drafters[0])


@router.post("/tlt/v1/drafter/update")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def update(request: Request) -> Response:
    """Activates another drafter on every rank, and answers when it is active: the client's `Drafter`.

    400: it is not a drafter for this server. 409: an older version, or one that was overtaken. 504: not staged in time;
    it may be activated by offering it again.
    """
    wanted = await body(request, DrafterUpdate)
    if (version := wanted.version) is None:  # above all, on all replicas
        drafters = _drafters(await ask(ReadVersions()))
        version = 1 + max((each.staging.version if each.staging else each.newest for each in drafters), default=0)
    path = await _as_served(wanted)
    answers = await ask(Offer(path, version, wanted.trained_on, wanted.sha256))
    until = time.monotonic() + STAGING_S
    while any(each.live.version != version for each in _drafters(answers)):
        if time.monotonic() > until:
            raise HTTPException(504, f"version {version} is not staged after {STAGING_S:.0f} s")
        await asyncio.sleep(PAUSE_S)
        answers = await ask(ReadVersions())
        if all(each.staging is None or each.staging.ready for each in _drafters(answers)):
            answers = await ask(Commit(version))
    return as_json(_drafters(answers)[0])


async def _as_served(wanted: DrafterUpdate) -> str:
    """The path that the schedulers read: one that is made of the folder, where that is not as SGLang names things."""
    folder = Path(wanted.path)
    if drafts_by_own_head(get_server_args()) or not (folder / "config.json").is_file():
        return wanted.path  # then the tensors speak for themselves
    try:
        found = await asyncio.to_thread(as_served, wanted.path, drafter_cache())
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error
    if found != folder and wanted.sha256 is not None:
        raise HTTPException(
            400, f"{wanted.path}: is not read as it lies there, so sha256 cannot be checked. Leave it out"
        )
    return str(found)


@router.post("/tlt/v1/drafter/rollback")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def rollback() -> Response:
    """Activates the drafter of before; if that one was overtaken on trial, the trusted one. 409: there is none."""
    return as_json(_drafters(await ask(RollBack()))[0])


@router.post("/tlt/v1/drafter/freeze")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def freeze(request: Request) -> Response:
    """Holds updates back, or lets them in again."""
    wanted = await body(request, DrafterFreeze)
    return as_json(_drafters(await ask(Freeze(wanted.frozen)))[0])


@router.post("/tlt/v1/trainer")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def trainer(request: Request) -> Response:
    """Takes what the link says of the drafter trainer, for the status and the events. For the link alone."""
    told = await body(request, DrafterTrainer)
    await ask(HearTrainer(told))
    return as_json(told)


@router.put("/tlt/v1/drafter/watchdog")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def watchdog(request: Request) -> Response:
    """Arms the watchdog, or lets it observe only."""
    wanted = await body(request, DrafterWatchdog)
    return as_json(_drafters(await ask(SetWatchdog(Watchfulness(wanted.mode))))[0])
