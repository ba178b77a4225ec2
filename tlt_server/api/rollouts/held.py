"""While generation is held, by a pause or by offloaded memory, no request ends: what waits for one would hang."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request, Response
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils.aio_rwlock import RWLock

from tlt_server.api.scheduler import ask, tokenizer_manager
from tlt_server.engine.messages import Answer, ReadVersions

router = APIRouter()

ASK_S = 0.25
"""Between two questions whether the schedulers are held."""
LOOK_S = 0.01
"""Between two looks whether anything came of them; upstream's is the first after a second."""
HEALTHY_S = 20.0
"""Within which a healthy scheduler answers, which does so between two steps; upstream's default for its own check."""


class UpdateLock(RWLock):
    """Upstream's lock, which an update takes once all requests have ended; while they cannot, it goes on without."""

    @property
    def writer_lock(self) -> Any:
        return self._written()

    @asynccontextmanager
    async def _written(self) -> AsyncIterator[None]:
        acquiring = asyncio.ensure_future(self.acquire_writer())
        try:
            await asyncio.wait({acquiring}, timeout=0)
            while not acquiring.done() and not _are_held(await ask(ReadVersions())):
                await asyncio.wait({acquiring}, timeout=ASK_S)
            if not acquiring.done():
                await self._give_up(acquiring)
            yield
        finally:
            if not acquiring.done():
                await self._give_up(acquiring)
            if not acquiring.cancelled():
                await self.release_writer()

    async def _give_up(self, acquiring: "asyncio.Future[None]") -> None:
        acquiring.cancel()
        await asyncio.wait({acquiring})
        async with self._cond:
            self._cond.notify_all()  # readers wait behind a writer that waits


@router.get("/health")
@router.get("/health_generate")
async def health(request: Request) -> Response:
    """Upstream's generates a token. Where nothing can be generated, schedulers that answer are healthy."""
    from sglang.srt.entrypoints import http_server

    if tokenizer_manager().server_status is ServerStatus.Starting:
        upstreams: Response = await http_server.health_generate(request)
        return upstreams
    until = time.monotonic() + HEALTHY_S
    generating: asyncio.Task[Response] | None = None
    while time.monotonic() < until:
        asking = asyncio.ensure_future(ask(ReadVersions()))  # never cancelled: its answer would be another's
        await asyncio.wait({asking}, timeout=until - time.monotonic())
        if not asking.done():
            break
        if tokenizer_manager().is_pause or _are_held(asking.result()):
            return Response(status_code=200)
        began = time.time()
        generating = generating or asyncio.ensure_future(http_server.health_generate(request))
        while not generating.done() and time.time() < began + ASK_S:
            await asyncio.wait({generating}, timeout=LOOK_S)
            if tokenizer_manager().last_receive_tstamp > began:
                return Response(status_code=200)  # upstream's, which looks a second later, ends by itself
        if generating.done():
            return generating.result()
    return Response(status_code=503)


def _are_held(answers: list[Answer]) -> bool:
    return any(answer.held for answer in answers)
