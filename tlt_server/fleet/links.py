"""The front's connections to members, and what members say of themselves."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from tlt_server.errors import ServerFailed
from tlt_server.fleet.members import Seen

IDLE_S = 2.0
"""How long an idle connection is kept: a server closes it after 5 s, and loses a request that comes just then."""
CONNECT_S = 5.0
BROKEN = (aiohttp.ClientError, ConnectionError)
"""A connection that could not be made, or broke."""


class Reply(NamedTuple):
    status: int
    body: bytes
    type: str = "application/json"

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class Limits(NamedTuple):
    """Seconds. probe_every: between two probes of a member, each of which waits `probe` for its answer. call: for the
    answer to a control call, but to a broadcast of the trainer's. patience: that a request waits for a ready member."""

    probe_every: float = 2.0
    probe: float = 10.0
    call: float = 900.0
    patience: float = 30.0


def refusal(status: int, message: str) -> Reply:
    """An error in all dialects at once."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return Reply(status, msgspec.json.encode({"object": "error", "success": False, **error, "error": error}))


class Links:
    """A pool for all members. key: that the front's own calls show."""

    def __init__(self, key: str | None = None) -> None:
        pool = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ttl_dns_cache=60)
        no_end = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_S, sock_read=None)
        jar = aiohttp.DummyCookieJar()
        self.http = aiohttp.ClientSession(connector=pool, timeout=no_end, auto_decompress=False, cookie_jar=jar)
        self._own = {"Authorization": f"Bearer {key}"} if key else {}

    async def close(self) -> None:
        await self.http.close()

    async def ask(
        self,
        url: str,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        within_s: float | None = None,
    ) -> Reply:
        """One call with its whole answer. target: path and query. headers: of whom it is asked for; None: the front.

        Raises ServerFailed: no answer, or none in time.
        """
        given = dict(self._own if headers is None else headers)
        if body:
            given.setdefault("Content-Type", "application/json")
        asking = self.http.request(method, at(url, target), data=body, headers=given, allow_redirects=False)
        try:
            async with asyncio.timeout(within_s), asking as answer:
                return Reply(answer.status, await answer.read(), answer.headers.get("Content-Type", ""))
        except TimeoutError as error:
            raise ServerFailed(f"{target} is not answered within {within_s} s") from error
        except (*BROKEN, ValueError) as error:
            raise ServerFailed(f"{target}: {type(error).__name__}: {error}") from error

    async def see(self, url: str, within_s: float) -> Seen:
        """What it says of its weights. ServerFailed: nothing, or nothing that makes sense."""
        return seen(await self.ask(url, "GET", "/tlt/v1/status", within_s=within_s))

    async def world(self, url: str, within_s: float) -> int:
        """Its ranks. ServerFailed: it does not say."""
        reply = await self.ask(url, "GET", "/get_world_size", within_s=within_s)
        if reply.ok:
            return int(_read(reply, _World).world_size)
        sizes = _read(await self.ask(url, "GET", "/server_info", within_s=within_s), _Sizes)
        return int(sizes.tp_size * sizes.pp_size * sizes.dp_size)

    async def listens(self, url: str) -> bool:
        """Whether any process listens there; one that takes no connection in time may do so still."""
        parts = URL(url)
        try:
            async with asyncio.timeout(CONNECT_S):  # `wait_for` of Python 3.11 may lose a cancellation
                _, writer = await asyncio.open_connection(parts.host, parts.port)
        except ConnectionRefusedError:
            return False
        except (TimeoutError, OSError):
            return True
        writer.close()
        return True


def at(url: str, target: str) -> URL:
    """A member's route; target as the client wrote it."""
    return URL(url + target, encoded=True)


class _World(msgspec.Struct):
    world_size: int


class _Sizes(msgspec.Struct):
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


class _Target(msgspec.Struct):
    version: int
    weight_version: str
    partial: bool = False
    missing: list[str] = []


class _Versions(msgspec.Struct):
    target: _Target


class _Models(msgspec.Struct):
    target: str = ""


class _Status(msgspec.Struct):
    versions: _Versions
    models: _Models


def seen(reply: Reply) -> Seen:
    """Of an answer to `/tlt/v1/status`. ServerFailed: it is none."""
    status = _read(reply, _Status)
    target = status.versions.target
    whole = not target.partial and not target.missing
    return Seen(target.weight_version, target.version, whole, Path(status.models.target).name)


def _read(reply: Reply, kind: Any) -> Any:
    if not reply.ok:
        raise ServerFailed(f"it answers {reply.status}: {reply.body[:200].decode(errors='replace')}")
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.MsgspecError as error:
        raise ServerFailed(f"its answer makes no sense: {error}") from error
