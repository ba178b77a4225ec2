"""No answer is left open: a connection that is not given back stays taken, and the server goes on sampling for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import httpx
import pytest
from sglang_stand_in import ABORT, rollout

from tlt_client import AsyncClient, Client, ServerUnavailable, Timeout

Connect = Callable[..., Any]


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that repeats its only piece until it is closed."""

    def __init__(self, piece: bytes) -> None:
        self.piece, self.closed = piece, False

    def __iter__(self) -> Iterator[bytes]:
        while not self.closed:
            yield self.piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class Endlessly(httpx.MockTransport, httpx.AsyncBaseTransport):
    """Answers each /generate with an endless body, and aborts with nothing."""

    def __init__(self, piece: bytes = b" ", status: int = 200) -> None:
        self.bodies: list[Endless] = []
        self.piece, self.status = piece, status
        super().__init__(self.reply)

    def reply(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/abort_request":
            return httpx.Response(200, content=b"")
        self.bodies.append(Endless(self.piece))
        return httpx.Response(self.status, stream=self.bodies[-1])


def event(finish: Any) -> bytes:
    return b"data: " + json.dumps(rollout({"rid": "r"}, [65], finish)).encode() + b"\n\n"


@pytest.mark.parametrize("status", [200, 400])
def test_a_body_that_outlasts_the_deadline_is_closed(connect: Connect, status: int) -> None:
    ticks = iter(range(1000))
    transport = Endlessly(status=status)
    with pytest.raises(Timeout):
        connect("http://server", transport=transport, clock=lambda: float(next(ticks))).generate("a", deadline_s=9)
    assert [body.closed for body in transport.bodies] == [True]


def test_a_stream_that_begins_with_a_refusal_is_closed_before_the_next(connect: Connect) -> None:
    transport = Endlessly(event({**ABORT, "status_code": 503, "message": "full"}))
    with pytest.raises(ServerUnavailable, match="full"):
        connect("http://server", transport=transport).stream("a")
    assert [body.closed for body in transport.bodies] == [True] * 6


def test_a_stream_is_closed_by_who_leaves_it() -> None:
    sync, awaited = Endlessly(event(None)), Endlessly(event(None))
    with Client("http://server", transport=sync) as client:
        chunks = client.stream("a")
        with closing(chunks):
            assert next(chunks).text == "A"
            assert [body.closed for body in sync.bodies] == [False]

    async def leave() -> None:
        async with AsyncClient("http://server", transport=awaited) as client, aclosing(client.stream("a")) as chunks:
            assert (await anext(chunks)).text == "A"
            assert [body.closed for body in awaited.bodies] == [False]

    asyncio.run(leave())
    assert [body.closed for body in sync.bodies + awaited.bodies] == [True, True]


def test_a_stream_is_closed_after_its_last_chunk(connect: Connect) -> None:
    transport = Endlessly(event({"type": "stop", "matched": 2}))
    assert connect("http://server", transport=transport).stream("a")[-1].rollout.text == "A"
    assert transport.bodies[0].closed
