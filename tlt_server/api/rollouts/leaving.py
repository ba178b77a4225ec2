"""A client that hangs up ends its request at once, whatever it has asked for: one answer, a stream, a batch, a group.

Upstream looks for lost connections every four seconds, and for those of streams two seconds after they ended.
"""

import asyncio
from collections.abc import Container
from typing import Any

from tlt_server.api.auth import path_of
from tlt_server.api.fields.routes import TABLES


class Leaving:
    """ASGI middleware around SGLang's application. The gate's routes may be cut: upstream's `generate_request` aborts
    what it had under way. What changes the server must come to its end, heard or not. routes: the gate's."""

    def __init__(self, app: Any, routes: Container[str] = TABLES) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or path_of(scope) not in self._routes:
            await self._app(scope, receive, send)
            return
        client = Client(receive)
        answering = asyncio.create_task(self._app(scope, client.receive, send))
        leaving = asyncio.create_task(client.leave())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()


class Client:
    """The one reader of a connection: passes the request's body on, then waits for the connection's end."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._read, self._left = asyncio.Event(), asyncio.Event()

    async def receive(self) -> Any:
        """As the application receives: the body, then nothing before the client leaves."""
        if self._read.is_set():
            await self._left.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if not message.get("more_body"):
            self._read.set()
        return message

    async def leave(self) -> None:
        """Returns when the client has left, or has its answer."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left.set()
