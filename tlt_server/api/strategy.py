"""The HTTP route of the strategy: how decode steps speculate, and whether."""

from fastapi import APIRouter, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level
from tlt_client.schemas import StrategyUpdate

from tlt_server.api.scheduler import as_json, ask, body
from tlt_server.engine.messages import Answer, ReadVersions, Wish

router = APIRouter()


def _first(answers: list[Answer]) -> Response:
    """Under data parallelism that of the first replica."""
    return as_json(answers[0].speculation)


@router.get("/tlt/v1/strategy")
async def strategy() -> Response:
    """The client's `Speculation`."""
    return _first(await ask(ReadVersions()))


@router.put("/tlt/v1/strategy")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def update(request: Request) -> Response:
    """Takes effect on all ranks at their next decode step. 409: there is no drafter to speculate with; 422: settings
    that cannot be, every fault named, and nothing was changed."""
    wanted = await body(request, StrategyUpdate)
    return _first(await ask(Wish(wanted)))
