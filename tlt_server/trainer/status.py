"""A trainer over HTTP: GET /tlt/v1/train/status, /metrics for Prometheus, and POST /tlt/v1/train/steps."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from tlt_client.schemas import TrainedSteps, TrainSteps

from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.demands import Demands
from tlt_server.trainer.spot import State
from tlt_server.trainer.workers import WorkerStatus

CONNECTIONS = 64
"""That are answered at a time."""
LONGEST_BODY = 1024
"""Bytes."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer at a moment; as it is made, one that waits for a server whose drafter it is to begin with.

    state: what it does, or waits for. servers: names of those that follow it.
    steps, tokens: of training, those before a restart included. entries_per_s: learnt from, lately. loss: of the last
    step.
    target: number of the newest target of any server. frozen: of the target whose embedding and head are in use.
    checkpoint_in: steps. published: drafter version; 0: none yet. rejected: drafters in a row that no server kept.
    active: the newest active on a server; `in_force` is its former name.
    candidate, live: expected accept lengths of the drafter in training and of the active one, when last judged. surely:
    the share that the former gains at least; judged_by: requests. candidate_reaches, live_reaches: the share of chains
    whose first 1, 2, ... drafts are all accepted; accept length is one more than their sum.
    control_dropped: messages of peers that were no server's, malformed, or too many. feature_messages: that were read.
    connections_cut: by link, for they asked too much.
    tokens_received: of features that were taken; tokens_dropped: of those that were not, by reason.
    parts_dropped: what the buffer did not take or keep, by reason.
    buffer_bytes, buffer_budget: of features.
    slowdown: by which decode steps take longer for training beside them, lately; a share, by the servers' own times.
    workers: the trainer's processes, by rank.
    """

    state: str = "waiting for a server"
    servers: list[str] = []
    steps: int = 0
    tokens: int = 0
    entries_per_s: float = 0.0
    loss: float | None = None
    target: int = -1
    frozen: int = -1
    checkpoint_in: int = 0
    published: int = 0
    rejected: int = 0
    active: int = 0
    in_force: int = 0
    candidate: float | None = None
    live: float | None = None
    surely: float | None = None
    judged_by: int = 0
    candidate_reaches: list[float] = []
    live_reaches: list[float] = []
    control_dropped: int = 0
    feature_messages: int = 0
    connections_cut: dict[str, int] = {}
    tokens_received: int = 0
    tokens_dropped: dict[str, int] = {}
    parts_dropped: dict[str, int] = {}
    buffer_bytes: int = 0
    buffer_budget: int = 0
    slowdown: float = 0.0
    workers: list[WorkerStatus] = []


# Each: a metric's name, its help, the field of `Status`.
COUNTERS = (
    ("tlt_train_steps", "Steps of training", "steps"),
    ("tlt_train_tokens", "Tokens learnt from, each as often as it was", "tokens"),
    ("tlt_train_control_dropped", "Messages of peers: no server's, malformed, or too many", "control_dropped"),
    ("tlt_train_feature_messages", "Messages read on the features link", "feature_messages"),
    ("tlt_train_tokens_received", "Tokens whose features were taken", "tokens_received"),
)
COUNTERS_BY = (
    ("tlt_train_tokens_dropped", "Tokens whose features were not taken, by reason", "tokens_dropped", "reason"),
    ("tlt_train_parts_dropped", "Parts of sequences that the buffer does not keep", "parts_dropped", "reason"),
    ("tlt_train_connections_cut", "Connections that asked too much", "connections_cut", "link"),
)
"""With the label that they are counted by."""
GAUGES_BY_POSITION = (
    ("tlt_train_candidate_reach", "Chains whose drafts up to here are accepted, in training", "candidate_reaches"),
    ("tlt_train_live_reach", "Chains whose drafts up to here are accepted, of the active drafter", "live_reaches"),
)
"""Shares, by the draft's position in the chain, from 1."""
GAUGES = (
    ("tlt_train_entries_per_second", "Tokens learnt from in a second, lately", "entries_per_s"),
    ("tlt_train_loss", "Loss of the last step", "loss"),
    ("tlt_train_candidate_accept_length", "Expected of the drafter in training, on held-out prompts", "candidate"),
    ("tlt_train_live_accept_length", "Expected of the active drafter, on held-out prompts", "live"),
    ("tlt_train_target_version", "The newest target, by the trainer's own number", "target"),
    ("tlt_train_frozen_version", "The target whose embedding and head are in use", "frozen"),
    ("tlt_train_drafter_published", "The drafter that was published last", "published"),
    ("tlt_train_drafter_active", "The newest drafter that is active on a server", "active"),
    ("tlt_train_drafter_in_force", "The former name of tlt_train_drafter_active", "in_force"),
    ("tlt_train_rollout_slowdown", "Share by which decode steps take longer beside training, lately", "slowdown"),
    ("tlt_train_buffer_bytes", "Features held", "buffer_bytes"),
    ("tlt_train_buffer_budget_bytes", "Features held at most", "buffer_budget"),
)


class Metrics(Collector):
    """For Prometheus, of what `read` returns."""

    def __init__(self, read: Callable[[], Status]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        for name, said, field in COUNTERS:
            yield CounterMetricFamily(name, said, getattr(status, field))
        for name, said, field, label in COUNTERS_BY:
            family = CounterMetricFamily(name, said, labels=[label])
            for value, count in getattr(status, field).items():
                family.add_metric([value], count)
            yield family
        yield from _of_workers(status.workers)
        for name, said, field in GAUGES_BY_POSITION:
            by_position = GaugeMetricFamily(name, said, labels=["position"])
            for position, share in enumerate(getattr(status, field), 1):
                by_position.add_metric([str(position)], share)
            yield by_position
        for name, said, field in GAUGES:
            if (value := getattr(status, field)) is not None:
                yield GaugeMetricFamily(name, said, value)


def _of_workers(workers: Sequence[WorkerStatus]) -> Iterator[Metric]:
    states = GaugeMetricFamily("tlt_train_worker_state", "1 for the state that it is in", labels=["rank", "state"])
    seconds = CounterMetricFamily("tlt_train_worker_seconds", "Time in each state", labels=["rank", "state"])
    yields = CounterMetricFamily("tlt_train_worker_yields", "Devices given back to rollouts", labels=["rank"])
    slowest = GaugeMetricFamily("tlt_train_worker_slowest_yield_seconds", "The longest of them", labels=["rank"])
    for rank, worker in enumerate(workers):
        for state in State:
            states.add_metric([str(rank), state.value], worker.state == state.value)
            seconds.add_metric([str(rank), state.value], worker.seconds[state.value])
        yields.add_metric([str(rank)], worker.yields)
        slowest.add_metric([str(rank)], worker.slowest_yield_s)
    yield from (states, seconds, yields, slowest)


async def _asked(request: Request) -> TrainSteps:
    """Of a type that no page of another site may send without being asked first. Raises HTTPException."""
    if request.headers.get("content-type") != "application/json":
        raise HTTPException(415, "content-type must be application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_BODY:
            raise HTTPException(413, f"more than {LONGEST_BODY} bytes")
    try:
        return msgspec.json.decode(body, type=TrainSteps)
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from error


async def _met(demands: Demands | None, request: Request, read: Callable[[], Status]) -> TrainedSteps:
    """Raises HTTPException: it is not, or not now, for being asked."""
    asked = await _asked(request)
    if demands is None:
        raise HTTPException(409, "this trainer trains by itself: set on_demand = true in its settings")
    began = time.monotonic()
    if (met := await demands.meet(asked.steps, asked.within_s, request.is_disconnected, asked.until)) is None:
        raise HTTPException(409, "it takes steps that were asked for already: ask when they are over")
    if demands.ended:
        raise HTTPException(503, "the trainer ends: what it printed says why")
    (taken, is_over), status = met, read()
    seconds = time.monotonic() - began
    return TrainedSteps(taken, seconds, status.published, status.active, "" if is_over else status.state)


def _app(read: Callable[[], Status], demands: Demands | None) -> FastAPI:
    app, registry = FastAPI(title="tlt-server train"), CollectorRegistry()
    registry.register(Metrics(read))

    @app.get("/tlt/v1/train/status")
    def status() -> Response:
        return Response(msgspec.json.encode(read()), media_type="application/json")

    @app.post("/tlt/v1/train/steps")
    async def steps(request: Request) -> Response:
        made = await _met(demands, request, read)
        return Response(msgspec.json.encode(made), media_type="application/json")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


@contextlib.contextmanager
def shown(host: str, port: int, read: Callable[[], Status], demands: Demands | None = None) -> Iterator[str]:
    """Shows what `read` returns, called in other threads, and takes demands, while the context lasts; gives the URL.
    Raises ConfigError: the port cannot be had."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"port {port} of {host}: {error.strerror}. Name another one by --port") from error
    config = uvicorn.Config(
        _app(read, demands),
        log_level="warning",
        lifespan="off",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=1,  # second: whoever does not read its answer keeps no trainer from ending
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="status")
    thread.start()
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        if demands is not None:
            demands.end()
        server.should_exit = True
        thread.join()
        listening.close()
