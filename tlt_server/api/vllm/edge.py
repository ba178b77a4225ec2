"""Control routes of the dialect: how they are registered, and what of theirs reaches the network.

None answers 5xx while the process lives: trainers send such a call again, into a broadcast that is over. 400 is for
what a call says, 409 for what cannot be now. A call that is repeated while the first one runs gets its answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from tlt_server.api.auth import path_of
from tlt_server.api.rollouts.gate import refusal
from tlt_server.api.scheduler import as_json
from tlt_server.errors import BadRequest

log = logging.getLogger(__name__)

Answering = Callable[[Request], Awaitable[Any]]

_running: dict[tuple[str, bytes], "asyncio.Task[Response]"] = {}


def control(router: APIRouter, path: str) -> Callable[[Answering], Answering]:
    """Registers what answers a POST with a JSON object. It may raise HTTPException or BadRequest."""

    def register(answer: Answering) -> Answering:
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def once(request: Request) -> Response:
            call = (str(request.url), await request.body())
            if call not in _running:
                _running[call] = task = asyncio.ensure_future(_answered(answer, request))
                task.add_done_callback(lambda _: _running.pop(call))
            return await asyncio.shield(_running[call])  # it goes on to its end if its caller goes away

        router.add_api_route(path, once, methods=["POST"], name=path)
        return answer

    return register


async def _answered(answer: Answering, request: Request) -> Response:
    try:
        return as_json(await answer(request))
    except BadRequest as error:
        status, said = 400, str(error)
    except HTTPException as error:
        status, said = 409 if error.status_code >= 500 else error.status_code, str(error.detail)
    except Exception as error:
        log.exception("%s failed", request.url.path)
        status, said = 409, f"{type(error).__name__}: {error}"
    return refusal(path_of(request.scope), status, said)


def word(request: Request, name: str, default: str, among: tuple[str, ...]) -> str:
    """A word of the query. Raises BadRequest: it is none of these."""
    given = request.query_params.get(name, default)
    if given not in among:
        raise BadRequest(f"{name} {given!r}: must be one of {', '.join(among)}")
    return given


def flag(request: Request, name: str, default: bool) -> bool:
    """A truth value of the query. Raises BadRequest: it is none."""
    given = request.query_params.get(name, str(default)).lower()
    if given not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name} {given!r}: must be true or false")
    return given in ("true", "1")
