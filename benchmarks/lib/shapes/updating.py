"""While requests run: a drafter is exchanged, and a part of the target published."""

import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from tlt_client.weights.tensors import buckets

from benchmarks.lib.reload.pushing import ByPath, Events
from benchmarks.lib.reload.streams import beside
from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import Tensors
from benchmarks.lib.servers import Request, Server
from tlt_server.errors import ServerFailed
from tlt_server.results import Figures

BUCKET_BYTES = 32 << 20
"""They go by /dev/shm, which a container may have 64 MiB of."""


def update(server: Server, requests: Sequence[Request], drafter: Path, part: Tensors) -> Figures:
    """Of a server that answers these requests again and again meanwhile: seconds until each was active.

    Args:
        drafter: for the drafter in force, of its names and shapes.
        part: tensors of the target; a session that may be partial carries them in flat buckets.

    Raises:
        ServerFailed: either was refused.
    """
    took: Figures = {}

    def work() -> None:
        events = Events(server)
        live = ByPath()(events, drafter).span
        took["swap_s"] = live.end - live.begin
        took["publication_s"] = _published(events, part)

    beside(lambda: server.ask(requests, at_once=len(requests)), work)
    return took


def _published(events: Events, part: Tensors) -> float:
    trainer, began = Trainer(events.server.url), time.monotonic()
    with trainer.http:
        _taken(trainer.post("/begin_weight_update", allow_partial=True))
        for bucket in buckets(part, BUCKET_BYTES):
            _taken(trainer.bucket(dict(bucket)))
        _taken(trainer.post("/end_weight_update"))
        events.wait("target_published")
    return time.monotonic() - began


def _taken(answer: httpx.Response) -> None:
    if answer.is_error or not answer.json()["success"]:
        raise ServerFailed(f"{answer.request.url.path} was refused: {answer.text}")
