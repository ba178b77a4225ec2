"""The fleet's ready members as workers of an sglang-router, for trainers that send their requests through one.

A router admits whoever answers, whatever its weights; so it is told of a member when that is ready, and when it is no
longer. Control calls go to the front. The router drops our headers: a member cannot refuse by its weights there.
"""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from tlt_server.errors import ServerFailed
from tlt_server.fleet.links import Links, Reply
from tlt_server.fleet.members import Fleet

ANSWER_S = 5.0


class _Worker(msgspec.Struct):
    id: str
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class Registered:
    """A task that keeps a router's workers; those that are no members are left alone. url: the router's. key: of the
    members, for the router's own calls."""

    def __init__(self, url: str, key: str | None, fleet: Fleet, links: Links, every_s: float) -> None:
        self._url, self._key, self._fleet, self._links, self._every_s = url, key, fleet, links, every_s
        self._turn = asyncio.Event()
        self._why = ""
        self._task = asyncio.create_task(self._keep())

    def turned(self) -> None:
        """Members have changed."""
        self._turn.set()

    async def close(self) -> None:
        """Takes all members out: nobody looks after their weights from here on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._told(frozenset())
        except ServerFailed as error:
            self._says(str(error))

    async def _keep(self) -> None:
        while True:
            try:
                await self._told(frozenset(member.url for member in self._fleet.ready()))
                self._says("")
            except ServerFailed as error:
                self._says(str(error))
            try:
                async with asyncio.timeout(self._every_s):  # `wait_for` of Python 3.11 may lose a cancellation
                    await self._turn.wait()
            except TimeoutError:
                continue  # it may have dropped one by itself
            finally:
                self._turn.clear()

    async def _told(self, wanted: frozenset[str]) -> None:
        """ServerFailed: it does not answer, or refuses."""
        answer = await self._asked("GET", "/workers")
        try:
            workers = msgspec.json.decode(answer.body, type=_Workers).workers
        except msgspec.MsgspecError as error:
            raise ServerFailed(f"{self._url} is no sglang-router: {error}") from error
        known = {worker.url.rstrip("/"): worker.id for worker in workers}
        ours = {member.url for member in self._fleet.members.values()}
        for url in sorted((known.keys() & ours) - wanted):
            await self._asked("DELETE", f"/workers/{known[url]}", gone=True)
        for url in sorted(wanted - known.keys()):
            await self._asked("POST", "/workers", {"url": url} | ({"api_key": self._key} if self._key else {}))

    async def _asked(
        self, method: str, target: str, body: Mapping[str, str] | None = None, *, gone: bool = False
    ) -> Reply:
        sent = msgspec.json.encode(body) if body else None
        reply = await self._links.ask(self._url, method, target, sent, {}, ANSWER_S)
        if not reply.ok and not (gone and reply.status == 404):
            raise ServerFailed(
                f"{method} {target} is answered {reply.status}: {reply.body[:200].decode(errors='replace')}"
            )
        return reply

    def _says(self, why: str) -> None:
        """Once, as long as it stays."""
        if why != self._why:
            self._fleet.tell("router_failed" if why else "router_answers", None, f"{self._url}: {why}", time.time())
            self._why = why
