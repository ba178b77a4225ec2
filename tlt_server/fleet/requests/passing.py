"""Requests for responses: passed on byte by byte, to one member whose weights are the fleet's; a batch, to several.

One is sent a second time only if the member refused it before it sampled, is known to be dead, or was quarantined, and
nothing of its answer has gone out: never because it takes long. One that gives no seed is given one here, so that the
second member samples what the first would have.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import msgspec
from aiohttp import web
from multidict import CIMultiDict
from tlt_client.wire import PLACES, SEED

from tlt_server.fleet.calls import SAMPLED
from tlt_server.fleet.control import Control
from tlt_server.fleet.links import Reply, refusal
from tlt_server.fleet.members import State
from tlt_server.fleet.requests.batches import Batch, batch_of
from tlt_server.fleet.requests.exchange import ATTEMPT, HOP_BY_HOP, REPLICA, VERSION, Exchange
from tlt_server.fleet.requests.jobs import Counts, Job, Lost, Refused, aborted
from tlt_server.fleet.requests.routing import asked, choose, key_of, session_of


class Data:
    """The path of requests. `turned` has those that are held, and those on a member, look again."""

    def __init__(self, control: Control) -> None:
        self._control, self._fleet = control, control.fleet
        self.running: Counter[str] = Counter()
        """Prompts, by member."""
        self.jobs: set[Job] = set()
        self.counts = Counts()
        self._exchange = Exchange(control, self.counts)
        self._turn = asyncio.Event()

    def turned(self) -> None:
        """Members have changed: who is held may be sent, and what is on one in quarantine is taken from it."""
        self._turn.set()
        self._turn = asyncio.Event()
        for job in self.jobs:
            member = self._fleet.members.get(job.member or "")
            if member is not None and member.state is State.QUARANTINED:
                job.take_away(f"{member.name} is quarantined: {member.why}")

    async def answer(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        """The member's answer, or an error of the front's own."""
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP)
        headers.setdefault(SEED, str(secrets.randbits(53)))  # whichever member samples it, it is the same sample
        known = asked(body)
        job = Job(
            path, request.path_qs if request.rel_url.raw_query_string else request.rel_url.raw_path, request.method,
            headers, body, known, key_of(headers, known), headers.get(VERSION),
        )  # fmt: skip
        if known.batch and session_of(headers, known) is None and PLACES not in headers:
            names = [each.name for each in self._fleet.ready()]
            batch = batch_of(path, body) if len(names) > 1 else None
            if batch is not None and len(dealt := batch.dealt(self.running, names)) > 1:
                return await self._split(request, job, batch, dealt)
        return await self._whole(request, job)

    async def _split(
        self, request: web.BaseRequest, whole: Job, batch: Batch, dealt: Mapping[str, list[int]]
    ) -> web.StreamResponse:
        """The answer to a batch whose parts go out as requests of their own; where one fails, its answer is all."""
        self.counts.split += 1
        jobs = []
        for name, places in dealt.items():
            headers, body = whole.headers.copy(), batch.part(places)
            headers[PLACES] = batch.told(places)
            part = replace(whole, headers=headers, body=body, asked=asked(body), prefers=name, of=whole)
            jobs.append(replace(part, left=asyncio.Event()))
        tasks = [asyncio.ensure_future(self._whole(request, job)) for job in jobs]
        try:
            for task in asyncio.as_completed(tasks):
                if (answer := await task).status != 200:
                    return answer
        finally:
            for each in tasks:
                each.cancel()
        return _merged(batch, dealt, jobs, [each.result() for each in tasks])

    async def _whole(self, request: web.BaseRequest, job: Job) -> web.StreamResponse:
        self.jobs.add(job)
        try:
            return await self._attempts(request, job)
        finally:
            self.jobs.discard(job)

    async def _attempts(self, request: web.BaseRequest, job: Job) -> web.StreamResponse:
        while True:
            name = await self._admitted(job)
            if job.left.is_set():
                return answered(aborted(job, self._fleet.version))
            if name is None:
                return answered(refusal(503, "no member is ready: GET /tlt/v1/fleet says why"), {"Retry-After": "1"})
            prompts = job.asked.prompts
            job.member = name
            self.running[name] += prompts
            try:
                return await self._exchange.sent(request, job, name)
            except Refused as why:
                if job.attempt > 1:
                    reply = why.reply if why.reply is not None and job.wanted is not None else None
                    return answered(reply or refusal(503, f"refused twice: {why}"), {ATTEMPT: "2"})
                self.counts.resent[why.kind] += 1
                job.attempt, job.member, job.cut = 2, None, None
            except Lost as error:
                return answered(refusal(502, str(error)), {ATTEMPT: str(job.attempt), REPLICA: name})
            finally:
                self.running[name] -= prompts

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
        if job.attempt == 1 and job.prefers in names:
            return job.prefers
        return choose(job.key, self.running, names) if names else None

    # -- aborts --

    def abort(self, rids: set[str] | None) -> dict[str, bool]:
        """Ends what the front holds of these requests, or of all. Returns whether each rid is known to be on no
        member: whoever does not know it may have it."""
        found = dict.fromkeys(rids or (), False)
        for job in self.jobs:
            mine = job.names if rids is None else job.names & rids
            if job.member is None and (rids is None or mine):
                job.left.set()
                found |= dict.fromkeys(mine, True)
        return found | {name: False for job in self.jobs if job.member is not None for name in job.names & found.keys()}

    def holders(self, rid: str) -> list[str]:
        """Who has the request, or parts of it; of an unknown one, all that may."""
        known = [job.member for job in self.jobs if job.member is not None and rid in job.names]
        return known or [member.name for member in self._fleet.in_service()]


def _merged(
    batch: Batch, dealt: Mapping[str, list[int]], jobs: list[Job], answers: list[web.StreamResponse]
) -> web.Response:
    bodies = [bytes(each.body) for each in answers if isinstance(each, web.Response) and isinstance(each.body, bytes)]
    try:
        body = batch.merged(list(zip(dealt.values(), bodies, strict=True)))
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        return answered(refusal(502, f"the answers to the parts of a batch do not make one: {error}"))
    headers = CIMultiDict((k, v) for k, v in answers[0].headers.items() if k.lower() not in HOP_BY_HOP)
    headers[ATTEMPT] = str(max(job.attempt for job in jobs))
    headers[REPLICA] = ",".join(job.member or "" for job in jobs)
    return web.Response(body=body, headers=headers)


def answered(reply: Reply, more: Mapping[str, str] | None = None) -> web.Response:
    """A reply that is at hand."""
    headers = {"Content-Type": reply.type or "application/json"} | dict(more or {})
    return web.Response(status=reply.status, body=reply.body, headers=headers)
