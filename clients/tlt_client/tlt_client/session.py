"""What each method of the clients asks of the server, as a flow; and the limits of time that a call has."""

import math
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict

import httpx
import msgspec

from tlt_client import errors, partial, wire
from tlt_client.control import Control
from tlt_client.flow import RESAMPLED, Call, Flow, Policy, Retry, Sample
from tlt_client.rollouts import Rollout
from tlt_client.sampling import SamplingParams, sample_seed
from tlt_client.wire import Prompt


class AskedAgain(TypedDict, total=False):
    """Of every rollout that is continued. extra: other fields of SGLang's request, as {"priority": 1}."""

    deadline_s: float | None
    extra: Mapping[str, Any] | None
    version: str | int | None


class Asked(AskedAgain, total=False):
    """Of every rollout of a call."""

    logprobs: bool


class AskedOnce(Asked, total=False):
    """Of a call for one rollout. No rid may begin with another one that is in flight: an abort would end both."""

    rid: str | None


class Options(TypedDict, total=False):
    """Of both clients; `Client` says what they mean."""

    api_key: str | None
    admin_key: str | None
    retry: Retry | None
    connect_timeout_s: float
    read_timeout_s: float | None
    control_timeout_s: float
    max_concurrency: int
    clock: Callable[[], float]
    draw: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Session:
    """Shared by the sync and the async client; does no I/O. See `Client` for what the fields mean."""

    api_key: str | None = None
    admin_key: str | None = None
    retry: Retry | None = None
    connect_timeout_s: float = 10.0
    read_timeout_s: float | None = None
    control_timeout_s: float = 60.0
    max_concurrency: int = 256
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "read_timeout_s", "control_timeout_s", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise errors.InvalidArgument(f"{name}={value!r}: must be above 0")

    @cached_property
    def policy(self) -> Policy:
        return Policy(self.retry or Retry(), self.clock, self.draw)

    @cached_property
    def control(self) -> Control:
        return Control(self.policy, self.control_timeout_s)

    # -- samples --

    def one(self, prompt: Prompt, sampling: SamplingParams | None, *, rid: str | None = None, **asked: Any) -> Sample:
        if rid is not None and (not rid or rid.startswith(RESAMPLED)):
            raise errors.InvalidArgument(f"rid={rid!r}: must not be empty nor begin with {RESAMPLED!r}")
        (sample,) = self.samples([prompt], sampling, **asked)
        sample.first_rid = rid or sample.first_rid
        return sample

    def samples(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        logprobs: bool = False,
        deadline_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        version: str | int | None = None,
    ) -> list[Sample]:
        """One sample per prompt; the deadline is of all of them together and begins now."""
        if isinstance(prompts, str):
            raise errors.InvalidArgument("prompts is one string: give a list of prompts, or use generate")
        each = one_for_each(sampling, len(prompts))
        until, headers = self._until(deadline_s), wire.headers_for(version)
        return [
            Sample(wire.generate_fields(prompt, params, logprobs, extra), uuid.uuid4().hex, logprobs, until, headers)
            for prompt, params in zip(prompts, each, strict=True)
        ]

    def group(self, prompt: Prompt, n: int, sampling: SamplingParams | None, **asked: Any) -> list[Sample]:
        """n samples of one prompt."""
        if n < 1:
            raise errors.InvalidArgument(f"n={n}: a group has at least one sample")
        return self.samples([prompt] * n, sampling, **asked)

    def continuations(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        **asked: Any,
    ) -> list[Sample]:
        """A sample for each rollout, which goes on from it; of one that is whole there is nothing to ask."""
        if len(prompts) != len(rollouts):
            raise errors.InvalidArgument(f"{len(prompts)} prompts for {len(rollouts)} rollouts: give one for each")
        each = one_for_each(sampling, len(rollouts))
        return [
            self.continuation(rollout, prompt, params, **asked)
            for rollout, prompt, params in zip(rollouts, prompts, each, strict=True)
        ]

    def continuation(self, begun: Rollout, prompt: Prompt, sampling: SamplingParams, **asked: Any) -> Sample:
        if isinstance(prompt, str):
            raise errors.InvalidArgument("a prompt in text cannot be continued by tokens: give its token ids")
        tokens = [*wire.token_ids(prompt), *begun.tokens]
        begun, rest = partial.left_of(begun, sampling)
        if not begun.aborted:
            return Sample({}, begun.rid, False, math.inf, begun=begun)
        (sample,) = self.samples([tokens], rest, logprobs=begun.logprobs is not None, **asked)
        sample.fields |= partial.counting(begun, sampling, rest)
        sample.begun = begun
        return sample

    def rollout(self, sample: Sample) -> Flow[Rollout]:
        if sample.begun is None:
            return (yield from self.policy.sample(sample, self._rollout_once))
        if not sample.begun.aborted:
            return sample.begun
        more = yield from self.policy.sample(sample, self._rollout_once)
        return partial.joined(sample.begun, more)

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


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def one_for_each(sampling: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
    """Of one seed each has its own, as in one request for all: equal ones would make samples of a prompt equal."""
    if sampling is None or isinstance(sampling, SamplingParams):
        params = sampling or SamplingParams()
        if (seed := params.sampling_seed) is None:
            return [params] * n
        return [msgspec.structs.replace(params, sampling_seed=sample_seed(seed, i)) for i in range(n)]
    if len(sampling) != n:
        raise errors.InvalidArgument(f"{len(sampling)} sampling parameters for {n} prompts: give one, or one for each")
    return sampling


class Job(Protocol):
    """What concurrent.futures.Future and asyncio.Task have in common."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Rollout: ...


def harvest(jobs: Sequence[Job]) -> list[Rollout]:
    """The rollouts in order; or the first failure, which is given the rollouts that are complete."""
    over = {i: job for i, job in enumerate(jobs) if job.done() and not job.cancelled()}
    finished = {i: job.result() for i, job in over.items() if job.exception() is None}
    for i, job in over.items():
        if (error := job.exception()) is not None:
            if isinstance(error, errors.TltClientError):
                error.finished, error.index = finished, i
            raise error
    return [job.result() for job in jobs]
