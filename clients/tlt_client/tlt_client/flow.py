"""What to send, what to wait for and when to try again, without doing any of it.

A flow is a generator. It yields steps; whoever runs it performs each and hands back the outcome, or throws the
httpx.RequestError that it met. Both clients run the same flows: one blocks, the other awaits.

When is a request sent again? Sampling is not idempotent, so it depends on what may have happened to it:

- Never processed (no connection, or 503): after a pause that doubles each time, jittered, at least as long as a
  Retry-After asks for, `Retry.attempts` times in all.
- Perhaps processed (the connection broke after the request went out, or a proxy answered 502 or 504): its rid is
  aborted, and another rid is asked, at most `Retry.resamples` times. What the first may have sampled is returned to
  nobody, so each sample gives exactly one rollout.
- Out of time, or cut off in the middle of a stream that the caller has seen the beginning of: aborted, and raised.
- Anything else that the server answered, 4xx above all: raised.

Rids of resampled requests are `~resample<k>-` and the first rid. They must not begin with a rid before them: SGLang
aborts every request whose rid starts with the one it is given, so a late abort of the first would end the second. That
is why no rid of a caller may begin with `~`.
"""

import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

import httpx

from tlt_client import errors, wire
from tlt_client.rollouts import Rollout

logger = logging.getLogger("tlt_client")

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """Step: send one request. Its outcome is the Reply, its body still to be read."""

    method: str
    path: str
    until: float
    """On the client's clock, in seconds; infinite for no limit."""
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False
    """A control route, which asks for the admin key where the server has one."""


@dataclass(frozen=True)
class Reply:
    """The head of an answer, and its body as an iterator."""

    response: httpx.Response
    pieces: Iterator[bytes] | AsyncIterator[bytes]


@dataclass(frozen=True)
class Read:
    """Step: the next piece of a body. Its outcome is the bytes, b"" at the end."""

    reply: Reply


@dataclass(frozen=True)
class Close:
    """Step: be done with a reply whose body was not read to its end."""

    reply: Reply


@dataclass(frozen=True)
class Pause:
    """Step: let time pass."""

    seconds: float


@dataclass(frozen=True)
class Work:
    """Step: a function that may block, where nothing else waits for it. Its outcome is what it returns; what it raises
    ends the flow."""

    function: Callable[[], object]


Step: TypeAlias = Call | Read | Close | Pause | Work
Outcome: TypeAlias = object
Flow: TypeAlias = Generator[Step, Outcome, T]


def work(function: Callable[[], T]) -> Flow[T]:
    return cast(T, (yield Work(function)))


RESAMPLED = "~"

NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
NEVER_SENDABLE = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
OUT_OF_TIME = (httpx.ReadTimeout, httpx.WriteTimeout)


@dataclass(frozen=True)
class Retry:
    """How often and how patiently. `attempts` counts every request sent, the first too.

    Beware of `resamples` where something cuts connections after a fixed time, as proxies do: long rollouts are cut and
    short ones are not, and drawing again until one gets through favours short ones. `Rollout.resamples` tells you. From
    tlt-server it is the same sample that is drawn again, unless weights changed meanwhile.
    """

    attempts: int = 6
    resamples: int = 2
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.resamples < 0 or not 0 <= self.first_pause_s <= self.longest_pause_s < math.inf:
            raise errors.InvalidArgument(
                f"{self}: needs attempts >= 1, resamples >= 0, 0 <= first_pause_s <= longest_pause_s"
            )

    def pause_s(self, attempt: int, asked_s: float, draw: float) -> float:
        """After the attempt-th request; `draw` is uniform in [0, 1). Full jitter, so that a herd spreads out."""
        backoff = min(self.first_pause_s * 2.0 ** (attempt - 1), self.longest_pause_s)
        return min(asked_s, self.longest_pause_s) + draw * backoff


@dataclass
class Sample:
    """One rollout that was asked for, and how far it is."""

    fields: dict[str, object]
    first_rid: str
    logprobs: bool
    until: float
    headers: Mapping[str, str] = field(default_factory=dict)
    resamples: int = 0
    in_flight: bool = False
    dropped: bool = False
    """Its batch has failed: send it no more."""
    begun: Rollout | None = None
    """What it goes on from."""
    seed: int = field(default_factory=lambda: secrets.randbits(53))
    """For a server that takes one where the body gives none: sampled anew, it is the same sample."""

    @property
    def rid(self) -> str:
        return f"{RESAMPLED}resample{self.resamples}-{self.first_rid}" if self.resamples else self.first_rid

    def call(self, stream: bool) -> Call:
        body = wire.encode(self.fields | {"rid": self.rid, "stream": stream})
        return Call("POST", "/generate", self.until, body, {**self.headers, wire.SEED: str(self.seed)})


@dataclass(frozen=True)
class Policy:
    """The flows that sending again is made of. `clock` counts seconds from anywhere, `draw` is uniform in [0, 1)."""

    retry: Retry = field(default_factory=Retry)
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    abort_s: float = 5.0
    """How long the abort of a lost request may take."""

    def ask(self, call: Call) -> Flow[bytes]:
        """A request that may be processed twice without harm."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return (yield from self.fetch(call))
            except (errors.ServerUnavailable, errors.ConnectionLost) as error:
                failure = error
            yield from self._back_off(attempt, failure, call.until)

    def sample(self, sample: Sample, once: Callable[[Sample], Flow[T]]) -> Flow[T]:
        """A request that must not be counted twice: the policy at the head of this module. `once` makes one attempt."""
        attempt = 0
        try:
            while True:
                attempt += 1
                self._may_send(sample)
                try:
                    return (yield from once(sample))
                except errors.ServerUnavailable as error:
                    failure: errors.RequestUnserved = error
                except (errors.ConnectionLost, errors.Timeout) as error:
                    yield from self.abort(sample.rid)
                    if isinstance(error, errors.Timeout) or sample.resamples >= self.retry.resamples:
                        raise
                    logger.warning("%s is lost and will be sampled anew: %s", sample.rid, error)
                    sample.resamples += 1
                    failure = error
                yield from self._back_off(attempt, failure, sample.until)
        finally:
            sample.in_flight = False

    def fetch(self, call: Call) -> Flow[bytes]:
        """One request; the body of its answer, or the failure as one of our errors."""
        reply = yield from self.open(call)
        return (yield from self._whole(reply, call.until))

    def open(self, call: Call) -> Flow[Reply]:
        """One request; its answer, which is a 200, with the body unread."""
        reply = yield from self._perform(call)
        assert isinstance(reply, Reply)
        if reply.response.status_code == 200:
            return reply
        body = yield from self._whole(reply, call.until)
        error = wire.refusal(reply.response.status_code, wire.message_of(body), call.path)
        if isinstance(error, errors.ServerUnavailable):
            error.retry_after_s = _retry_after_s(reply.response.headers)
        raise error

    def read(self, reply: Reply, until: float) -> Flow[bytes]:
        """The next piece of a body; b"" at its end."""
        piece = yield from self._perform(Read(reply))
        assert isinstance(piece, bytes)
        if self.clock() > until:
            raise errors.Timeout("the deadline passed while the answer was coming in")
        return piece

    def _whole(self, reply: Reply, until: float) -> Flow[bytes]:
        pieces: list[bytes] = []
        try:
            while piece := (yield from self.read(reply, until)):
                pieces.append(piece)
        except errors.TltClientError:
            yield Close(reply)
            raise
        return b"".join(pieces)

    def abort(self, rid: str) -> Flow[bool]:
        """Tells the server to give a request up. False where it could not be told: its answer is lost all the same."""
        body = wire.encode({"rid": rid})
        try:
            yield from self.fetch(Call("POST", "/abort_request", self.clock() + self.abort_s, body, admin=True))
        except errors.TltClientError as error:
            logger.warning("could not abort %s, the server may sample it to its end: %s", rid, error)
            return False
        return True

    def _may_send(self, sample: Sample) -> None:
        sample.in_flight = (
            True  # before the question: `Session.abandon` sets one, then reads the other, in another thread
        )
        if sample.dropped:
            raise errors.Aborted(f"{sample.rid} was not sent: its batch had failed")
        if self.clock() >= sample.until:
            raise errors.Timeout(f"the deadline passed before {sample.rid} could be sent")

    def _back_off(self, attempt: int, failure: errors.RequestUnserved, until: float) -> Flow[None]:
        """Pauses before the next attempt, or raises `failure` if there is to be none."""
        asked_s = (failure.retry_after_s or 0.0) if isinstance(failure, errors.ServerUnavailable) else 0.0
        pause_s = self.retry.pause_s(attempt, asked_s, self.draw())
        if attempt >= self.retry.attempts or self.clock() + pause_s >= until:
            raise failure
        logger.info("attempt %d failed, the next one in %.1f s: %s", attempt, pause_s, failure)
        yield Pause(pause_s)

    def _perform(self, step: Call | Read) -> Flow[Outcome]:
        """The network's edge: where httpx's errors become ours."""
        try:
            return (yield step)
        except NEVER_SENDABLE as error:
            raise errors.InvalidArgument(f"{_said(error)}: it cannot be sent") from error
        except NOT_SENT as error:
            raise errors.ServerUnavailable(f"{_said(error)}: no connection; is the server up?") from error
        except OUT_OF_TIME as error:
            raise errors.Timeout(f"{_said(error)}: no answer in the time that the call has") from error
        except httpx.DecodingError as error:
            raise errors.ProtocolError(f"{_said(error)}: the answer's content encoding is broken") from error
        except httpx.RequestError as error:
            raise errors.ConnectionLost(f"{_said(error)}: the connection broke") from error


def _said(error: httpx.RequestError) -> str:
    return f"{error.request.method} {error.request.url}: {str(error) or type(error).__name__}"


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Retry-After in its form of seconds. The form of a date is not read: it would need the two clocks to agree."""
    value = headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdecimal() else None
