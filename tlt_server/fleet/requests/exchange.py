"""One attempt at a request: to a member and back, byte by byte, and what a connection that breaks means."""

import asyncio
import time

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tlt_server.fleet.calls import SAMPLED
from tlt_server.fleet.control import Control
from tlt_server.fleet.links import BROKEN, Reply, at
from tlt_server.fleet.requests.jobs import Counts, Job, Lost, Refused

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


class Exchange:
    """What goes to members and comes from them."""

    def __init__(self, control: Control, counts: Counts) -> None:
        self._control, self._fleet, self._counts = control, control.fleet, counts
        self._http = control.links.http

    async def sent(self, request: web.BaseRequest, job: Job, name: str) -> web.StreamResponse:
        """Raises Refused or Lost, either before anything has gone out to the client."""
        url, version = self._fleet.members[name].url, self._fleet.version
        if job.wanted is None and version is not None and job.path in SAMPLED:
            job.headers[VERSION] = version
        out: list[web.StreamResponse] = []
        well: bool | None = None
        """Neither, of a request that was refused, was wrong, was taken away, or whose client left."""
        job.sending = asyncio.create_task(self._there_and_back(request, job, name, url, out))
        try:
            made = await job.sending
            well = True if made.status < 400 else False if made.status >= 500 else None
            return made
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if job.cut is None or (task is not None and task.cancelling()):
                raise  # the client has left, and the end of our connection aborts its request
            if out:
                return _cut_off(request, out)
            raise Refused(job.cut, "quarantined") from None
        except (*BROKEN, TimeoutError) as error:
            client = request.transport
            if client is None or client.is_closing():
                return web.Response(status=499)
            well = False
            if out:
                return _cut_off(request, out)
            raise await self._loss(name, url, error) from error
        finally:
            job.sending = None
            if well is not None:
                self._fleet.request_ended(name, time.time(), well=well)

    async def _there_and_back(
        self, request: web.BaseRequest, job: Job, name: str, url: str, out: list[web.StreamResponse]
    ) -> web.StreamResponse:
        calling = self._http.request(
            job.method, at(url, job.target), data=job.body or None, headers=job.headers, allow_redirects=False,
            skip_auto_headers=SKIPPED,
        )  # fmt: skip
        async with calling as answer:
            return await self._passed(request, job, name, answer, out)

    async def _loss(self, name: str, url: str, error: BaseException) -> Refused | Lost:
        """What a connection that could not be made, or broke, means: a process that is gone has no answer to come."""
        why = f"{name}: {type(error).__name__}: {error}"
        if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
            return Refused(why, "dead")
        for _ in range(LOOKS):  # its sockets end one after another
            if not await self._control.links.listens(url):
                self._fleet.silent(name, why, time.time(), dead=True)
                return Refused(why, "dead")
            await asyncio.sleep(LOOK_S)
        return Lost(f"{why}. It lives, and may have sampled the answer that was lost")

    async def _passed(
        self,
        request: web.BaseRequest,
        job: Job,
        name: str,
        answer: aiohttp.ClientResponse,
        out: list[web.StreamResponse],
    ) -> web.StreamResponse:
        headers = CIMultiDict((k, v) for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP)
        headers[ATTEMPT], headers[REPLICA] = str(job.attempt), name
        self._counts.requests[name, answer.status] += 1
        if job.of is not None or "Content-Length" in answer.headers or answer.status in (204, 304):
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
        """Raises Refused where the member did not begin. 409 to a client that wants other weights is its answer."""
        wanted = job.headers.get(VERSION)
        if answer.status == 409 and wanted is not None and (job.wanted is None or wanted == self._fleet.version):
            if not self._control.holds:
                self._fleet.refused(name, wanted, time.time())
        elif answer.status != 503 or TOO_LONG in body:
            return
        reply = Reply(answer.status, body, answer.headers.get("Content-Type", ""))
        raise Refused(f"{name} answered {answer.status}: {body[:200].decode(errors='replace')}", "refused", reply)


def _cut_off(request: web.BaseRequest, out: list[web.StreamResponse]) -> web.StreamResponse:
    """The client sees that its answer broke off."""
    if request.transport is not None:
        request.transport.abort()
    return out[0]
