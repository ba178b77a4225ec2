"""The HTTP route of the strategy: how decode steps speculate, and whether."""

from fastapi import APIRouter, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level
from tlt_client.schemas import StrategyUpdate

from tlt_server.api.scheduler import as_json, ask, body
from tlt_server.engine.messages import Answer, Learn, ReadLearned, ReadStepTimes, ReadVersions, Wish
from tlt_server.strategy.estimates import Learned

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


@router.get("/tlt/v1/strategy/step_times")
async def step_times() -> Response:
    """The client's `StepTimes`, of the first replica."""
    return as_json((await ask(ReadStepTimes()))[0].step_times)


@router.get("/tlt/v1/strategy/learned")
async def learned() -> Response:
    """What was learned of the arms, to be sent to a server that starts. 409: there is no drafter."""
    return as_json((await ask(ReadLearned()))[0].learned)


@router.put("/tlt/v1/strategy/learned")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def learn(request: Request) -> Response:
    """Goes on from there; what is said of other arms is passed over. 409: there is no drafter."""
    return _first(await ask(Learn(await body(request, Learned))))
