"""The HTTP routes of the history: what others may read of it, load and clear."""

from fastapi import APIRouter, HTTPException, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level
from tlt_client.schemas import HistoryLoad

from tlt_server.api.scheduler import as_json, ask, body
from tlt_server.engine.messages import Answer, ForgetHistory, LoadHistory, ReadVersions

router = APIRouter()


def _first(answers: list[Answer]) -> Response:
    """Under data parallelism that of the first replica."""
    if answers[0].history is None:
        raise HTTPException(404, "this server keeps no history: start it with --arm history:7")
    return as_json(answers[0].history)


@router.get("/tlt/v1/history")
async def history() -> Response:
    """The client's `History`. 404: the server keeps none, as for the other two."""
    return _first(await ask(ReadVersions()))


@router.post("/tlt/v1/history")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def load(request: Request) -> Response:
    """Takes in responses that were sampled elsewhere, or before a restart, in all replicas. 422: tokens that the model
    does not have."""
    given = await body(request, HistoryLoad)
    return _first(await ask(LoadHistory(given)))


@router.delete("/tlt/v1/history")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def forget(namespace: str | None = None) -> Response:
    """Clears it, or what it has of one namespace."""
    return _first(await ask(ForgetHistory(namespace)))
