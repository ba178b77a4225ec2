"""The HTTP routes that tlt-server adds to SGLang's, and `/metrics`, which it completes."""

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, HTTPException, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware import Middleware
from fastapi.routing import APIRoute
from sglang.srt.runtime_context import get_server_args

from tlt_server.api import control, drafter, forks, page, strategy, weights
from tlt_server.api.auth import Authorization
from tlt_server.api.control import answer_bad_request, answer_value_error
from tlt_server.api.fields.routes import tables_of
from tlt_server.api.rollouts import held, history
from tlt_server.api.rollouts.gate import Gate, read_server
from tlt_server.api.rollouts.leaving import Leaving
from tlt_server.api.rollouts.needs import NeededWeights
from tlt_server.api.scheduler import as_json, ask, load, tokenizer_manager
from tlt_server.api.status import describe
from tlt_server.api.vllm import pauses, rollouts, transfer
from tlt_server.config import Dialect
from tlt_server.engine.messages import ReadVersions
from tlt_server.errors import BadRequest
from tlt_server.keys import masked

if TYPE_CHECKING:  # SGLang imports this module before it has settled where the processes' metrics meet
    from prometheus_client import CollectorRegistry

router = APIRouter()


def add_routes(app: FastAPI, dialect: Dialect = Dialect.SGLANG) -> None:
    """Adds our routes to SGLang's application, before its own of the same path. dialect: whose API it speaks.

    One by one: how a route is protected is read from the application's table, where a router that was included stands
    as one entry, in FastAPI's later versions, that says nothing.
    """
    tables = tables_of(dialect)
    dialects = (pauses.router, transfer.router, rollouts.router) if dialect is Dialect.VLLM else ()
    ours = (
        router,
        control.router,
        held.router,
        weights.router,
        forks.router,
        drafter.router,
        strategy.router,
        history.router,
        page.router,
    )
    routers = (*dialects, *ours)
    for route in (route for each in routers for route in each.routes):
        assert isinstance(route, APIRoute)
        app.add_api_route(route.path, route.endpoint, methods=list(route.methods or ()))
    app.add_middleware(NeededWeights)
    app.add_middleware(Leaving, routes=tables)
    # override: innermost, where add_middleware puts outermost: what decompresses bodies comes first
    app.user_middleware += [Middleware(Gate, server=read_server, tables=tables)]
    app.add_middleware(Authorization, routes=app)  # added last, asked first
    app.add_exception_handler(BadRequest, answer_bad_request)
    app.add_exception_handler(ValueError, answer_value_error)


def registry() -> "CollectorRegistry":
    """A registry that reads the metrics of all processes of this server. Raises HTTPException: 404, the server runs
    without metrics."""
    if not get_server_args().enable_metrics:
        raise HTTPException(404, "this server runs without metrics: start it with --enable-metrics")
    from prometheus_client import CollectorRegistry

    from tlt_server.api.scrape import ServerCollector

    registry = CollectorRegistry()
    ServerCollector(registry)  # type: ignore[no-untyped-call]
    return registry


@router.get("/metrics")
def metrics() -> Response:
    """Prometheus' text format. SGLang's own route of this path comes later in the table, so this one answers."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(registry()), media_type=CONTENT_TYPE_LATEST)


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info() -> Any:
    """SGLang's own answer, without what is secret in it."""
    from sglang.srt.entrypoints import http_server

    return masked(await http_server.server_info())


@router.get("/tlt/v1/status")
async def status() -> Response:
    """What this server is and how speculation does, as the client's `Status`."""
    families = await run_in_threadpool(lambda: list(registry().collect()))
    answers = await ask(ReadVersions())
    paused = tokenizer_manager().is_pause  # a pause that aborts is not told to schedulers
    return as_json(describe(get_server_args(), families, answers, await load(), paused=paused))
