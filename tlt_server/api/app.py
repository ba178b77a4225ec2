"""The HTTP routes that tlt-server adds to SGLang's, and `/metrics`, which it completes."""

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, HTTPException, Response
from sglang.srt.runtime_context import get_server_args

from tlt_server.api.status import describe

if TYPE_CHECKING:  # SGLang imports this module before it has settled where the processes' metrics meet
    from prometheus_client import CollectorRegistry

router = APIRouter()


def registry() -> "CollectorRegistry":
    """A registry that reads the metrics of all processes of this server.

    Raises:
        HTTPException: 404, the server runs without metrics.
    """
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


@router.get("/tlt/v1/status")
def status() -> Response:
    """What this server is and how speculation does, as the client's `Status`."""
    families = list(registry().collect())
    return Response(msgspec.json.encode(describe(get_server_args(), families)), media_type="application/json")
