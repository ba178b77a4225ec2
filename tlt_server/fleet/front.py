"""The front: one HTTP server whose routes are the fleet's. It finds out what a request is, and passes it on."""

import asyncio
import hmac
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiohttp import web

from tlt_server.errors import BadRequest, ConfigError, ServerFailed
from tlt_server.fleet.calls import ABORTS, CONTROL, SAMPLED, TOKENIZED
from tlt_server.fleet.control import Control
from tlt_server.fleet.kept import Keeper
from tlt_server.fleet.links import Limits, Links, Reply, refusal
from tlt_server.fleet.log import Log
from tlt_server.fleet.members import Fleet
from tlt_server.fleet.reads import Reads
from tlt_server.fleet.registered import Registered
from tlt_server.fleet.requests.passing import Data, answered
from tlt_server.fleet.upkeep import Upkeep
from tlt_server.keys import Keys
from tlt_server.watch.page import FILES, HEADERS

MAX_BODY, MAX_CONTROL = 2**26, 2**24
"""Bytes, as of a member."""
HOLD_TENSORS = frozenset({"/update_weights_from_tensor"})
"""Of any size."""
OPEN = frozenset({"/health", "/health_generate", "/liveness", "/metrics"})
MEMBERS = "/tlt/v1/fleet/members"
SHOWN = ("Authorization", "Content-Type")
"""Headers of a caller that members see of a control call or a read."""
LONG_HEADERS = 1 << 15

log = logging.getLogger(__name__)


class Joining(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /tlt/v1/fleet/members`, of a member that says where it is; `DELETE` takes one out by its name."""

    name: str
    url: str = ""
    why: str = ""


class Abort(msgspec.Struct):
    """Of both dialects; vLLM's without ids is of all."""

    rid: str | None = None
    abort_all: bool = False
    request_ids: list[str] | None = None


class Beside(NamedTuple):
    """URLs of what stands beside a front: an sglang-router that is told of ready members, and a keeper."""

    router: str | None = None
    keeper: str | None = None


ALONE = Beside()


class Front:
    """A fleet's HTTP server. It lives from `start` to `close`, within one event loop."""

    def __init__(self, state: Path, min_ready: int, limits: Limits, keys: Keys, beside: Beside = ALONE) -> None:
        """ConfigError: the log in this folder cannot be used."""
        self._keys, self._log, self._beside = keys, Log(state), beside
        self._registered: Registered | None = None
        self.fleet = Fleet(min_ready)
        self._limits = limits

    async def start(self, host: str, port: int, members: Mapping[str, str]) -> None:
        """Listens. ConfigError: it cannot, there. members: by name, their URLs."""
        self._links = Links(self._keys.admin or self._keys.api)
        self.control = Control(self.fleet, self._links, self._log, self._limits, self._turned)
        if (url := self._beside.keeper) is not None:
            self.control.keeper = Keeper(url, self._links, self._limits.probe)
            try:
                await self.control.keeper.recall()
            except ServerFailed as error:
                await self._links.close()
                raise ConfigError(f"--keeper {url}: {error}. Start it by `tlt-server keeper`") from error
        self.data = Data(self.control)
        self._reads = Reads(self.control, self.data)
        self._upkeep = Upkeep(self.control, self._turned)
        server = web.Server(
            self._answer, handler_cancellation=True, access_log=None, auto_decompress=False,
            max_line_size=LONG_HEADERS, max_field_size=LONG_HEADERS,
        )  # fmt: skip
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"port {port} on {host}: {error.strerror}. Choose another with --port") from error
        if (url := self._beside.router) is not None:
            every = self._limits.probe_every
            self._registered = Registered(url, self._keys.api, self.fleet, self._links, every)
        self._recalling = asyncio.create_task(self._upkeep.recall())
        for name, url in members.items():
            self._upkeep.join(name, url)

    async def close(self) -> None:
        self._recalling.cancel()
        await self._upkeep.close()
        await self.control.close()
        if self._registered is not None:
            await self._registered.close()
        await self._runner.cleanup()
        await self._links.close()
        self._log.close()

    def _turned(self) -> None:
        self.data.turned()
        if self._registered is not None:
            self._registered.turned()

    # -- requests --

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The network's edge: whatever a client sends, it gets an answer, and the front lives."""
        try:
            return await self._routed(request)
        except BadRequest as error:
            return answered(refusal(400, str(error)))
        except ServerFailed as error:
            return answered(refusal(409, str(error)))
        except Exception as error:
            log.exception("%s %s failed", request.method, request.rel_url.raw_path)
            return answered(refusal(500, f"the front failed: {type(error).__name__}: {error}"))

    async def _routed(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and (file := FILES.get(request.rel_url.raw_path)) is not None:
            return web.Response(body=file[0].read_bytes(), headers={**HEADERS, "Content-Type": file[1]})
        path, method = request.rel_url.raw_path.rstrip("/") or "/", request.method
        if not self._may(request, path, method):
            return answered(Reply(401, b'{"error":"Unauthorized"}'))
        sent = method in ("POST", "PUT", "DELETE")
        limit = None if path in HOLD_TENSORS else MAX_BODY if path in SAMPLED else MAX_CONTROL
        body = await _read(request, limit) if sent or request.body_exists else b""
        if body is None:
            return answered(refusal(413, f"more than {limit} bytes: send it in parts"))
        if sent and (path in SAMPLED or path in TOKENIZED):
            return await self.data.answer(request, path, body)
        headers = {name: request.headers[name] for name in SHOWN if name in request.headers}
        query = request.rel_url.raw_query_string
        target = path + ("?" + query if query else "")
        return answered(await self._told(method, path, target, body, headers))

    async def _told(self, method: str, path: str, target: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The answer to what is no request for a response."""
        if (method, path) in CONTROL:
            return await self.control.call(method, target, body, headers)
        reply = None
        if method == "POST" and path in ABORTS:
            reply = await self._abort(path, body, headers)
        elif method in ("POST", "DELETE") and path == MEMBERS:
            reply = self._member(method, body)
        elif method in ("GET", "HEAD"):
            reply = await self._reads.answer(path, target, headers)
        return reply or refusal(404, f"{method} {path[:200]}: no route of a fleet")

    def _may(self, request: web.BaseRequest, path: str, method: str) -> bool:
        """Whether the key that a route asks for was shown."""
        changes = method != "GET" and path not in SAMPLED and path not in TOKENIZED and path not in ABORTS
        key = (self._keys.admin if changes else None) or self._keys.api
        if key is None or path in OPEN:
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key.encode())

    # -- aborts and members --

    async def _abort(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """A request by its rid at its holder, all of them everywhere. What the front holds is answered as aborted."""
        try:
            given = msgspec.json.decode(body, type=Abort) if body.strip() else Abort()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadRequest(f"{path}: {error}") from error
        rids = given.request_ids if given.rid is None else [given.rid]
        everything = given.abort_all or (rids is None and path != "/abort_request")
        if not everything and not rids:
            raise BadRequest("an abort names a rid, or says abort_all")
        ended = self.data.abort(None if everything else set(rids or ()))
        if everything:
            names = [member.name for member in self.fleet.members.values() if member.seen is not None]
        else:
            names = sorted({name for rid, here in ended.items() if not here for name in self.data.holders(rid)})
        asking = (self._links.ask(self.fleet.members[name].url, "POST", path, body, headers, 10.0) for name in names)
        replies = [each for each in await asyncio.gather(*asking, return_exceptions=True) if isinstance(each, Reply)]
        if not replies:
            return Reply(200, b'{"status":"aborted","aborted":%d}' % len(ended))
        return next((reply for reply in replies if not reply.ok), replies[0])

    def _member(self, method: str, body: bytes) -> Reply:
        try:
            given = msgspec.json.decode(body, type=Joining)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"{MEMBERS}: {error}") from error
        if method == "DELETE":
            if given.name not in self.fleet.members:
                return refusal(404, f"no member {given.name!r}: {given.why}")
            self._upkeep.retire(given.name, given.why or "taken out")
        elif given.url.startswith(("http://", "https://")):
            self._upkeep.join(given.name, given.url.rstrip("/"))
        else:
            raise BadRequest(f"url {given.url!r}: must begin with http:// or https://")
        return Reply(200, msgspec.json.encode({"success": True, "name": given.name}))


async def _read(request: web.BaseRequest, limit: int | None) -> bytes | None:
    """The body; None: it is longer than the limit."""
    if limit is not None and (request.content_length or 0) > limit:
        return None
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, size = [], 0
    while part := await request.content.readany():
        parts.append(part)
        size += len(part)
        if limit is not None and size > limit:
            return None
    return parts[0] if len(parts) == 1 else b"".join(parts)
