"""What each method of the clients asks of the server, as a flow; and the limits of time that a call has."""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from tlt_client import errors, wire
from tlt_client.batches import one_for_each
from tlt_client.flow import RESAMPLED, Call, Close, Flow, Policy, Reply, Sample
from tlt_client.rollouts import Chunk, Rollout
from tlt_client.sampling import SamplingParams
from tlt_client.schemas import (
    Drafter,
    DrafterFreeze,
    DrafterTrainer,
    DrafterUpdate,
    DrafterWatchdog,
    Event,
    Load,
    SharedTarget,
    Speculation,
    Status,
    StrategyUpdate,
    TargetShare,
)
from tlt_client.streams import ChunkReader
from tlt_client.wire import Prompt


def _new_rid() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Session:
    """Shared by the sync and the async client; does no I/O. See `Client` for what the fields mean."""

    policy: Policy = field(default_factory=Policy)
    api_key: str | None = None
    admin_key: str | None = None
    connect_timeout_s: float = 10.0
    read_timeout_s: float | None = None
    control_timeout_s: float = 60.0
    max_concurrency: int = 256
    new_rid: Callable[[], str] = _new_rid

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "read_timeout_s", "control_timeout_s", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise errors.InvalidArgument(f"{name}={value!r}: must be above 0")

    # -- samples --

    def samples(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        logprobs: bool,
        deadline_s: float | None,
        extra: Mapping[str, Any] | None,
        version: str | int | None,
        rid: str | None = None,
    ) -> list[Sample]:
        """One sample per prompt; the deadline is of all of them together and begins now."""
        if isinstance(prompts, str):
            raise errors.InvalidArgument("prompts is one string: give a list of prompts, or use generate")
        if rid is not None and (not rid or rid.startswith(RESAMPLED)):
            raise errors.InvalidArgument(f"rid={rid!r}: must not be empty nor begin with {RESAMPLED!r}")
        each = one_for_each(sampling, len(prompts))
        until, headers = self._until(deadline_s), wire.headers_for(version)
        return [
            Sample(
                wire.generate_fields(prompt, params, logprobs, extra), rid or self.new_rid(), logprobs, until, headers
            )
            for prompt, params in zip(prompts, each, strict=True)
        ]

    def group(self, prompt: Prompt, n: int, sampling: SamplingParams | None, **options: Any) -> list[Sample]:
        """n samples of one prompt. Equal seeds would make them equal, so each has its own."""
        if n < 1:
            raise errors.InvalidArgument(f"n={n}: a group has at least one sample")
        params = sampling or SamplingParams()
        if (seed := params.sampling_seed) is None:
            return self.samples([prompt] * n, params, **options)
        seeded = [msgspec.structs.replace(params, sampling_seed=seed + i) for i in range(n)]
        return self.samples([prompt] * n, seeded, **options)

    def rollout(self, sample: Sample) -> Flow[Rollout]:
        return self.policy.sample(sample, self._rollout_once)

    def _rollout_once(self, sample: Sample) -> Flow[Rollout]:
        body = yield from self.policy.fetch(sample.call(stream=False))
        return wire.read_rollout(body, sample.logprobs, sample.resamples)

    def abandon(self, samples: Sequence[Sample]) -> Flow[None]:
        """Ends the samples of a batch that has failed: none is sent any more, and those in flight are aborted."""
        for sample in samples:
            sample.dropped = True
        for sample in samples:
            if sample.in_flight and not (yield from self.policy.abort(sample.rid)):
                return  # the server cannot be told, and trying 255 times more takes as many time-outs

    # -- control --

    def healthy(self) -> Flow[bool]:
        try:
            yield from self.policy.fetch(self._control("GET", "/health"))
        except errors.RequestUnserved:
            return False
        return True

    def status(self) -> Flow[Status]:
        body = yield from self.policy.ask(self._control("GET", "/tlt/v1/status"))
        return wire.decode(Status, body, "/tlt/v1/status")

    def server_info(self) -> Flow[dict[str, Any]]:
        body = yield from self.policy.ask(self._control("GET", "/server_info"))
        return wire.decode(dict[str, Any], body, "/server_info")

    def metrics(self) -> Flow[str]:
        body = yield from self.policy.ask(self._control("GET", "/metrics"))
        return body.decode(errors="replace")

    def abort(self, rid: str | None) -> Flow[None]:
        """None aborts everything."""
        if rid == "":
            raise errors.InvalidArgument("rid is empty, which the server ignores; abort_all() aborts everything")
        what = {"abort_all": True} if rid is None else {"rid": rid}
        yield from self.policy.ask(self._control("POST", "/abort_request", wire.encode(what)))

    def flush_cache(self, wait_s: float) -> Flow[None]:
        if not 0 <= wait_s < math.inf:
            raise errors.InvalidArgument(f"wait_s={wait_s}: must be a number of seconds, at least 0")
        yield from self.policy.ask(self._control("POST", f"/flush_cache?timeout={wait_s}", more_s=wait_s))

    def load(self) -> Flow[Load]:
        body = yield from self.policy.ask(self._control("GET", "/v1/loads?include=core"))
        loads = wire.decode(wire.Loads, body, "/v1/loads").loads
        return Load(sum(each.num_running_reqs for each in loads), sum(each.num_waiting_reqs for each in loads))

    # -- weights --

    def events(self, after: int) -> Flow[list[Event]]:
        body = yield from self.policy.ask(self._control("GET", f"/tlt/v1/events?after={after}"))
        return wire.decode(list[Event], body, "/tlt/v1/events")

    def drafter(self) -> Flow[Drafter]:
        return (yield from self._drafter("GET", "/tlt/v1/drafter"))

    def update_drafter(self, update: DrafterUpdate, within_s: float) -> Flow[Drafter]:
        return (yield from self._drafter("POST", "/tlt/v1/drafter/update", update, within_s))

    def roll_back_drafter(self) -> Flow[Drafter]:
        body = yield from self.policy.fetch(self._control("POST", "/tlt/v1/drafter/rollback"))
        return wire.decode(Drafter, body, "/tlt/v1/drafter/rollback")

    def freeze_drafter(self, frozen: bool) -> Flow[Drafter]:
        return (yield from self._drafter("POST", "/tlt/v1/drafter/freeze", DrafterFreeze(frozen)))

    def set_watchdog(self, mode: Literal["armed", "observe"]) -> Flow[Drafter]:
        return (yield from self._drafter("PUT", "/tlt/v1/drafter/watchdog", DrafterWatchdog(mode)))

    def _drafter(
        self, method: str, path: str, fields: msgspec.Struct | None = None, more_s: float = 0
    ) -> Flow[Drafter]:
        body = None if fields is None else msgspec.json.encode(fields)
        answer = yield from self.policy.ask(self._control(method, path, body, more_s))
        return wire.decode(Drafter, answer, path)

    def strategy(self, update: StrategyUpdate | None = None) -> Flow[Speculation]:
        body = None if update is None else msgspec.json.encode(update)
        path = "/tlt/v1/strategy"
        return wire.decode(
            Speculation, (yield from self.policy.ask(self._control("PUT" if body else "GET", path, body))), path
        )

    def learned(self) -> Flow[dict[str, Any]]:
        path = "/tlt/v1/strategy/learned"
        return wire.decode(dict[str, Any], (yield from self.policy.ask(self._control("GET", path))), path)

    def learn(self, learned: Mapping[str, Any]) -> Flow[None]:
        body = msgspec.json.encode(learned)
        yield from self.policy.ask(self._control("PUT", "/tlt/v1/strategy/learned", body))

    def report_trainer(self, trainer: DrafterTrainer) -> Flow[None]:
        yield from self.policy.ask(self._control("POST", "/tlt/v1/trainer", msgspec.json.encode(trainer)))

    def share_target(self, path: str, within_s: float) -> Flow[SharedTarget]:
        fields, route = msgspec.json.encode(TargetShare(path)), "/tlt/v1/target/share"
        body = yield from self.policy.fetch(self._control("POST", route, fields, within_s))
        return wire.decode(SharedTarget, body, route)

    def begin_weight_update(self, selector: str | None) -> Flow[None]:
        fields = wire.encode({} if selector is None else {"selector": selector})
        yield from self.policy.fetch(self._control("POST", "/begin_weight_update", fields))

    def end_weight_update(self) -> Flow[None]:
        yield from self.policy.fetch(self._control("POST", "/end_weight_update"))

    def update_weights_from_disk(self, model_path: str, weight_version: str | None, within_s: float) -> Flow[None]:
        fields = {"model_path": model_path} | ({} if weight_version is None else {"weight_version": weight_version})
        yield from self.policy.ask(self._control("POST", "/update_weights_from_disk", wire.encode(fields), within_s))

    def _control(self, method: str, path: str, body: bytes | None = None, more_s: float = 0.0) -> Call:
        admin = method != "GET"
        return Call(method, path, self._until(self.control_timeout_s + more_s), body, admin=admin)

    # -- what the transport is told --

    def request(self, http: httpx.Client | httpx.AsyncClient, call: Call) -> httpx.Request:
        left = max(call.until - self.policy.clock(), 0.001)
        timeout = httpx.Timeout(
            connect=min(self.connect_timeout_s, left),
            read=_finite(min(self.read_timeout_s or math.inf, left)),
            write=_finite(left),
            pool=_finite(left),
        )
        key = (self.admin_key if call.admin else None) or self.api_key
        headers = dict(call.headers)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        return http.build_request(call.method, call.path, content=call.body, headers=headers, timeout=timeout)

    def _until(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return math.inf
        if not deadline_s > 0:
            raise errors.InvalidArgument(f"deadline_s={deadline_s}: must be above 0, or None for no deadline")
        return self.policy.clock() + deadline_s


class Streaming:
    """One streamed rollout. `more` gives the next chunks, and none at the end.

    Until the first chunk a failed request is sent again as any other. After it the caller has seen tokens that no
    second request would repeat, so a failure is raised.
    """

    def __init__(self, session: Session, sample: Sample) -> None:
        self._policy = session.policy
        self._sample = sample
        self.reply: Reply | None = None
        """Open from the first chunk on: whoever runs this closes it."""
        self._reader = ChunkReader(sample.logprobs, 0)

    def more(self) -> Flow[list[Chunk]]:
        if self.reply is None:
            return (yield from self._policy.sample(self._sample, self._open))
        if self._reader.done:
            return []
        try:
            return (yield from self._next(self.reply))
        except (errors.ConnectionLost, errors.Timeout, errors.ProtocolError):
            yield from self._policy.abort(self._sample.rid)
            raise

    def _open(self, sample: Sample) -> Flow[list[Chunk]]:
        self._reader = ChunkReader(sample.logprobs, sample.resamples)
        reply = yield from self._policy.open(sample.call(stream=True))
        try:
            chunks = yield from self._next(reply)
        except errors.TltClientError:
            yield Close(reply)
            raise
        self.reply = reply
        return chunks

    def _next(self, reply: Reply) -> Flow[list[Chunk]]:
        while True:
            piece = yield from self._policy.read(reply, self._sample.until)
            if not piece:
                self._reader.end()
                return []
            if chunks := self._reader.feed(piece):
                return chunks


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds
