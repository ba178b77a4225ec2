"""A keeper's HTTP routes: those by which a trainer broadcasts to a server, in both dialects, and the front's own.

GET  /tlt/v1/keeper         whether a trainer has joined, and how many tensors are staged
POST /tlt/v1/keeper/whole   makes a checkpoint of what came; {"path"} of it
POST /tlt/v1/keeper/settle  {"path", "refused"}: members read it, or refused it
"""

import asyncio
import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from safetensors import SafetensorError

from tlt_server.engine.transfer.asked import Init, Update, UpdateInfo
from tlt_server.errors import BadRequest, UpdateRefused
from tlt_server.fleet.keeper.folder import Kept
from tlt_server.fleet.keeper.receive import InitGroup, OfGroup, Receiver
from tlt_server.keys import Keys

Done = dict[str, Any]
MOST_BYTES = 2**24


class Keeper:
    """One trainer at a time: what blocks runs in one thread, a call after the other."""

    def __init__(self, kept: Kept, receiver: Receiver, keys: Keys) -> None:
        self._kept, self._receiver = kept, receiver
        self._key = keys.admin or keys.api
        self._thread = ThreadPoolExecutor(1, "receiver")

    def app(self) -> web.Application:
        receiver = self._receiver
        posts: dict[str, Callable[[bytes], Done | None]] = {
            "/init_weights_update_group": lambda body: receiver.init(_read(body, InitGroup)),
            "/destroy_weights_update_group": lambda body: receiver.destroy(_read(body or b"{}", OfGroup)),
            "/update_weights_from_distributed": lambda body: receiver.update(_read(body, OfGroup)),
            "/init_weight_transfer_engine": lambda body: receiver.begin(_read(body, Init).init_info.asked()),
            "/shutdown_weight_transfer_engine": lambda _: receiver.shut(),
            "/update_weights": lambda body: self._transfer(_read(body, Update).update_info),
            "/collective_rpc": self._rpc,
            "/tlt/v1/keeper/whole": lambda _: {"path": str(self._kept.whole())},
            "/tlt/v1/keeper/settle": self._settle,
        }
        gets = {"/health": self._health, "/get_world_size": self._world, "/tlt/v1/keeper": self._state}
        app = web.Application(client_max_size=MOST_BYTES)
        app.add_routes([web.post(path, self._answering(do)) for path, do in posts.items()])
        app.add_routes([web.get(path, answer) for path, answer in gets.items()])
        return app

    def _answering(self, do: Callable[[bytes], Done | None]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            if not self._may(request):
                return web.json_response({"error": "Unauthorized"}, status=401)
            body = await request.read()
            loop = asyncio.get_running_loop()
            try:  # whatever a trainer sends, and whenever it goes, the keeper lives
                done = await loop.run_in_executor(self._thread, do, body)
                return web.json_response(done or {"success": True, "message": "Succeeded."})
            except (BadRequest, UpdateRefused) as refused:
                return _no(400, str(refused))
            except RuntimeError as error:
                return _no(409, f"the broadcast failed: {str(error).splitlines()[0]}. Init the group again")
            except (OSError, SafetensorError) as error:
                return _no(409, f"what came cannot be written: {error}. Make room, and init the group again")

        return answer

    def _may(self, request: web.Request) -> bool:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        shown = scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), (self._key or "").encode())
        return self._key is None or shown

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _world(self, _request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _state(self, _request: web.Request) -> web.Response:
        return web.json_response({"joined": self._receiver.joined, "staged": self._kept.staged})

    def _transfer(self, info: UpdateInfo | None) -> None:
        if info is None:
            raise BadRequest("give update_info: of what lies in a folder, members are told by the front")
        self._receiver.transfer(info.asked())

    def _rpc(self, body: bytes) -> Done:
        call = _object(body)
        if call.get("method") != "update_weights_nccl":
            raise BadRequest(f"collective_rpc: method {call.get('method')!r} is not a keeper's")
        try:
            info = msgspec.convert((call.get("kwargs") or {}).get("update_info"), UpdateInfo)
        except msgspec.ValidationError as error:
            raise BadRequest(f"update_info: {error}") from error
        self._transfer(info)
        return {"results": [None]}

    def _settle(self, body: bytes) -> Done:
        said = _object(body)
        if said.get("refused"):
            self._kept.drop(Path(str(said.get("path"))))
        self._kept.clear_away()
        return {"success": True}


def _no(status: int, why: str) -> web.Response:
    return web.json_response(
        {"success": False, "message": why, "error": {"message": why, "code": status}}, status=status
    )


def _object(body: bytes) -> Done:
    return dict(_read(body, dict[str, Any]) if body.strip() else {})


def _read(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body: {error}") from error
