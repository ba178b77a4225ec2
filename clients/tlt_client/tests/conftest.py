"""Every test that takes `connect` runs with the sync and with the async client."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tlt_client import AsyncClient, Client


class Blocking:
    """Calls either client as if it were the sync one; a stream becomes a list of its chunks."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self._client, name)(*args, **kwargs)
            if inspect.isasyncgen(result):
                return self._loop.run_until_complete(self._listed(result))
            if inspect.isawaitable(result):
                return self._loop.run_until_complete(result)
            return list(result) if name == "stream" else result

        return call

    async def _listed(self, chunks: Any) -> list[Any]:
        return [chunk async for chunk in chunks]


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """connect(url, **options) gives a client that does not sleep; `client.pauses` says how long it would have."""
    loop = asyncio.new_event_loop()
    opened = []

    def connect(url: str, **options: Any) -> Any:
        pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        common = {"draw": lambda: 1.0, **options}
        client: Client | AsyncClient
        if request.param == "sync":
            client = Client(url, sleep=pauses.append, **common)
        else:
            client = AsyncClient(url, sleep=sleep, **common)
        opened.append(client)
        blocking = Blocking(client, loop)
        blocking.pauses = pauses  # type: ignore[attr-defined]
        return blocking

    yield connect
    for client in opened:
        if isinstance(client, Client):
            client.close()
        else:
            loop.run_until_complete(client.aclose())
    loop.close()
