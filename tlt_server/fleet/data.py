"""Requests for responses: passed on byte by byte, to one member whose weights are the fleet's.

One is sent a second time only if the member refused it before it sampled, or is known to be dead, and nothing of its
answer has gone out: never because it takes long. One that gives no seed is given one here, which both members have.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from tlt_client.wire import SEED

from tlt_server.fleet.calls import SAMPLED
from tlt_server.fleet.control import Control
from tlt_server.fleet.links import BROKEN, Reply, at, refusal
from tlt_server.fleet.routing import Asked, asked, choose, key_of

VERSION = "X-TLT-Weight-Version"
ATTEMPT, REPLICA = "X-TLT-Attempt", "X-TLT-Replica"
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers"),
        *("transfer-encoding", "upgrade", "proxy-connection", "host", "content-length", "expect"),
    }
)
TOO_LONG = b"running timeout"
"""SGLang's 503 of a response that it threw away because it took long; any other 503 is of before it sampled."""
LOOKS, LOOK_S = 4, 0.1
"""At a member whose connection broke, whether it is dead."""
SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""aiohttp would add these where the client gave none."""


class _Refused(Exception):
    """A member did not take the request. It may be sent again. reply: its answer, if it gave one."""

    def __init__(self, why: str, reply: Reply | None = None) -> None:
        super().__init__(why)
        self.reply = reply


class _Lost(Exception):
    """Nobody knows whether a member answered the request."""


@dataclass(eq=False)
class Job:
    """A request on its way. left: is set once it is aborted while the front holds it."""

    path: str
    target: str
    method: str
    headers: CIMultiDict[str]
    body: bytes
    asked: Asked
    key: bytes | None
    wanted: str | None
    began: float
    attempt: int = 1
    member: str | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Counts:
    """Since the front started, for its metrics."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    resent: Counter[str] = field(default_factory=Counter)
    held: int = 0


class Data:
    """The path of requests. `turned` wakes those that are held."""

    def __init__(self, control: Control) -> None:
        self._control, self._fleet = control, control.fleet
        self._http = control.links.http
        self.running: Counter[str] = Counter()
        self.jobs: set[Job] = set()
        self.counts = Counts()
        self._turn = asyncio.Event()

    def turned(self) -> None:
        """Requests that are held look again."""
        self._turn.set()
        self._turn = asyncio.Event()

    async def answer(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        """The member's answer, or an error of the front's own."""
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP)
        headers.setdefault(SEED, str(secrets.randbits(53)))  # whichever member samples it, it is the same sample
        known = asked(body)
        job = Job(
            path, request.path_qs if request.rel_url.raw_query_string else request.rel_url.raw_path, request.method,
            headers, body, known, key_of(headers, known), headers.get(VERSION), time.monotonic(),
        )  # fmt: skip
        self.jobs.add(job)
        try:
            return await self._attempts(request, job)
        finally:
            self.jobs.discard(job)

    async def _attempts(self, request: web.BaseRequest, job: Job) -> web.StreamResponse:
        while True:
            name = await self._admitted(job)
            if job.left.is_set():
                return answered(_aborted(job, self._fleet.version))
            if name is None:
                return answered(refusal(503, "no member is ready: GET /tlt/v1/fleet says why"), {"Retry-After": "1"})
            try:
                return await self._sent(request, job, name)
            except _Refused as why:
                if job.attempt > 1:
                    reply = why.reply if why.reply is not None and job.wanted is not None else None
                    return answered(reply or refusal(503, f"refused twice: {why}"), {ATTEMPT: "2"})
                self.counts.resent["refused" if why.reply is not None else "dead"] += 1
                job.attempt, job.member = 2, None
            except _Lost as error:
                return answered(refusal(502, str(error)), {ATTEMPT: str(job.attempt), REPLICA: name})

    # -- which member --

    async def _admitted(self, job: Job) -> str | None:
        """A member that may have the request now. None: nobody is ready, for long; or the request was aborted."""
        sampled = job.path in SAMPLED
        if (name := self._free(job, sampled)) is not None:
            return name
        self.counts.held += 1
        until = time.monotonic() + self._control.limits.patience
        leaving = asyncio.ensure_future(job.left.wait())
        try:
            while name is None and not job.left.is_set():
                turning = asyncio.ensure_future(self._turn.wait())
                left = None if sampled and self._control.holds else max(0.0, until - time.monotonic())
                done, _ = await asyncio.wait({turning, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                turning.cancel()
                name = self._free(job, sampled)
                if not done and name is None and not (sampled and self._control.holds):
                    break
        finally:
            leaving.cancel()
            self.counts.held -= 1
        return name

    def _free(self, job: Job, sampled: bool) -> str | None:
        if sampled and self._control.recalling:
            return None
        names = [each.name for each in self._fleet.ready() if not sampled or self._fleet.may_send(each.name)]
        return choose(job.key, self.running, names) if names else None

    # -- there and back --

    async def _sent(self, request: web.BaseRequest, job: Job, name: str) -> web.StreamResponse:
        """Raises _Refused or _Lost, either before anything has gone out to the client."""
        url, version = self._fleet.members[name].url, self._fleet.version
        if job.wanted is None and version is not None and job.path in SAMPLED:
            job.headers[VERSION] = version
        job.member = name
        self.running[name] += 1
        well: bool | None = None
        """Neither, of a request that was refused, was wrong, or whose client left."""
        out: list[web.StreamResponse] = []
        try:
            calling = self._http.request(
                job.method, at(url, job.target), data=job.body or None, headers=job.headers, allow_redirects=False,
                skip_auto_headers=SKIPPED,
            )  # fmt: skip
            async with calling as answer:
                made = await self._passed(request, job, name, answer, out)
                well = True if answer.status < 400 else False if answer.status >= 500 else None
                return made
        except (*BROKEN, TimeoutError) as error:
            client = request.transport
            if client is None or client.is_closing():  # it has left, and the end of our connection aborts its request
                return web.Response(status=499)
            well = False
            if out:  # the client sees that its answer is cut off
                client.abort()
                return out[0]
            raise await self._loss(name, url, error) from error
        finally:
            self.running[name] -= 1
            if well is not None:
                self._fleet.request_ended(name, time.time(), well=well)

    async def _loss(self, name: str, url: str, error: BaseException) -> "_Refused | _Lost":
        """What a connection that could not be made, or broke, means: a process that is gone has no answer to come."""
        why = f"{name}: {type(error).__name__}: {error}"
        if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
            return _Refused(why)
        for _ in range(LOOKS):  # its sockets end one after another
            if not await self._control.links.listens(url):
                self._fleet.silent(name, why, time.time(), dead=True)
                return _Refused(why)
            await asyncio.sleep(LOOK_S)
        return _Lost(f"{why}. It lives, and may have sampled the answer that was lost")

    async def _passed(
        self, request: web.BaseRequest, job: Job, name: str, answer: aiohttp.ClientResponse, out: list[Any]
    ) -> web.StreamResponse:
        headers = CIMultiDict((k, v) for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP)
        headers[ATTEMPT], headers[REPLICA] = str(job.attempt), name
        self.counts.requests[name, answer.status] += 1
        if "Content-Length" in answer.headers or answer.status in (204, 304):
            body = await answer.read()
            self._refused(job, name, answer, body)
            return web.Response(status=answer.status, reason=answer.reason, body=body, headers=headers)
        first = await answer.content.readany()
        self._refused(job, name, answer, first)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        await response.prepare(request)
        out.append(response)
        while first:
            await response.write(first)
            first = await answer.content.readany()
        await response.write_eof()
        return response

    def _refused(self, job: Job, name: str, answer: aiohttp.ClientResponse, body: bytes) -> None:
        """Raises _Refused where the member did not begin. 409 to a client that wants other weights is its answer."""
        wanted = job.headers.get(VERSION)
        if answer.status == 409 and wanted is not None and (job.wanted is None or wanted == self._fleet.version):
            if not self._control.holds:
                self._fleet.refused(name, wanted, time.time())
        elif answer.status != 503 or TOO_LONG in body:
            return
        reply = Reply(answer.status, body, answer.headers.get("Content-Type", ""))
        raise _Refused(f"{name} answered {answer.status}: {body[:200].decode(errors='replace')}", reply)

    # -- aborts --

    def abort(self, rids: set[str] | None) -> dict[str, bool]:
        """Ends what the front holds of these requests, or of all. Returns whether each rid is known to be on no
        member: whoever does not know it may have it."""
        found = dict.fromkeys(rids or (), False)
        for job in self.jobs:
            mine = set(job.asked.rids) & rids if rids is not None else set(job.asked.rids)
            if job.member is None and (rids is None or mine):
                job.left.set()
                found |= dict.fromkeys(mine, True)
        return found

    def holders(self, rid: str) -> list[str]:
        """The member that has the request; of an unknown one, all that may."""
        known = [job.member for job in self.jobs if job.member is not None and rid in job.asked.rids]
        return known or [member.name for member in self._fleet.in_service()]


def answered(reply: Reply, more: Mapping[str, str] | None = None) -> web.Response:
    """A reply that is at hand."""
    headers = {"Content-Type": reply.type or "application/json"} | dict(more or {})
    return web.Response(status=reply.status, body=reply.body, headers=headers)


def _aborted(job: Job, version: str | None) -> Reply:
    """What a server answers to a request that was aborted before anything was sampled."""
    rids = job.asked.rids
    if job.path != "/generate":
        choice = {"index": 0, "finish_reason": "abort", "text": "", "token_ids": [], "logprobs": None}
        message = {"message": {"role": "assistant", "content": ""}} if "chat" in job.path else {}
        return Reply(200, msgspec.json.encode({"id": rids[0] if rids else "", "choices": [choice | message]}))
    meta = {"finish_reason": {"type": "abort", "message": "Aborted"}, "prompt_tokens": 0, "completion_tokens": 0}
    each = [
        {"text": "", "output_ids": [], "meta_info": meta | {"id": rid, "cached_tokens": 0, "weight_version": version}}
        for rid in rids or [""]
    ]
    body = msgspec.json.encode(each if isinstance(job.asked.rid, list) else each[0])
    return Reply(200, body)
