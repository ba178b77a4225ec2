"""The front's side of a keeper: a trainer's group and broadcasts go there, and members read what came from a folder.

While the trainer sends, members serve as before: they hear of a publication when all of it has come.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tlt_server.errors import ServerFailed
from tlt_server.fleet.calls import Call, Said, broadcast, name_of
from tlt_server.fleet.links import Links, Reply
from tlt_server.fleet.transaction import Kind

DONE = Reply(200, b'{"success":true,"message":"Done, by the keeper."}')
Headers = Mapping[str, str]


class Keeper:
    """What the front knows of it. url: its own. within_s: for its answers, but while it waits for the trainer."""

    def __init__(self, url: str, links: Links, within_s: float) -> None:
        self.url, self._links, self._within_s = url, links, within_s
        self._joined = self._opened = False
        self._named: str | None = None
        self.staged = False

    async def recall(self) -> None:
        """What a front that starts anew finds. ServerFailed: it does not answer."""
        state = self._read(await self._links.ask(self.url, "GET", "/tlt/v1/keeper", within_s=self._within_s))
        self._joined, self.staged = bool(state.get("joined")), bool(state.get("staged"))

    async def answer(
        self, call: Call, method: str, target: str, body: bytes, told: Said, headers: Headers
    ) -> Reply | None:
        """Of a call that members need not hear of; None: they do, after what is staged if there is any, and
        `publishes` says so. ServerFailed: the keeper is gone, or what it received is."""
        path = target.partition("?")[0]
        if call.kind in (Kind.GROUP, Kind.LEAVE) or broadcast(path, told):
            return await self._passed(call, method, target, body, told, headers)
        if call.kind is Kind.NAME and self.staged:
            self._named = name_of(told)
            return DONE
        if call.kind is Kind.OPEN and self._joined:
            self._opened = True
            return DONE
        if call.kind is Kind.CLOSE and self._opened:
            self._opened, self._named = False, name_of(told) or self._named
            return DONE
        return None

    def publishes(self, kind: Kind, *, paused: bool) -> bool:
        """Whether what is staged is to reach members now: at the end of an update, or before generation continues."""
        if not self.staged or self._opened:
            return False
        return kind in (Kind.RESUME, Kind.CLOSE) or (kind is Kind.WRITE and not paused)

    async def whole(self) -> tuple[str, bytes]:
        """Has it make a checkpoint: its path, and the body of the call by which members read it."""
        said = self._read(await self._links.ask(self.url, "POST", "/tlt/v1/keeper/whole", b"{}"))
        path, body = str(said["path"]), {"model_path": str(said["path"]), "flush_cache": True}
        return path, msgspec.json.encode(body | ({"weight_version": self._named} if self._named else {}))

    async def settle(self, path: str, *, refused: bool) -> str | None:
        """Members have read it, or refused it, and nothing of it is staged any more. What is wrong with the keeper, if
        anything: it has only old folders to remove, and what members have, they have."""
        self.staged, self._named = False, None
        body = msgspec.json.encode({"path": path, "refused": refused})
        try:
            reply = await self._links.ask(self.url, "POST", "/tlt/v1/keeper/settle", body, within_s=self._within_s)
        except ServerFailed as error:  # the network's edge
            return self._gone(error)
        return None if reply.ok else self._answered(reply)

    async def _passed(self, call: Call, method: str, target: str, body: bytes, told: Said, headers: Headers) -> Reply:
        try:
            reply = await self._links.ask(self.url, method, target, body, headers)
        except ServerFailed as error:
            raise ServerFailed(self._gone(error)) from error
        if reply.ok and call.kind in (Kind.GROUP, Kind.LEAVE):
            self._joined, self.staged = call.kind is Kind.GROUP, False
        elif reply.ok:
            self.staged, self._named = True, name_of(told) or self._named
        return reply

    def _gone(self, error: ServerFailed) -> str:
        """What is to be said of it."""
        self._joined = self.staged = self._opened = False
        return f"the keeper at {self.url} is gone ({error}): start it again, and init the trainer's group again"

    def _answered(self, reply: Reply) -> str:
        return f"the keeper at {self.url} answers {reply.status}: {reply.body[:300].decode(errors='replace')}"

    def _read(self, reply: Reply) -> dict[str, Any]:
        if not reply.ok:
            raise ServerFailed(self._answered(reply))
        said: dict[str, Any] = msgspec.json.decode(reply.body)
        return said
