"""The link at work, from the first drafter to the word to end; the server's answers are given by the test."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import pytest
from tlt_client import AsyncClient, Event, Retry
from tlt_client.schemas import DrafterVersion

from tests.link.processes import idle, until
from tests.link.test_bridge import LIVE
from tests.wire.ends import CHUNK, HELLO, MODEL, drafter
from tlt_server.link import process
from tlt_server.wire.messages import READS_TO_TRAINER, Hello
from tlt_server.wire.sockets import Link
from tlt_server.wire.trainer import Sender

ANSWERS: dict[str, Any] = {"events": [], "loads": {"loads": []}, "update": LIVE, "trainer": {}, "health": {}}


async def greeted(*_: Any) -> tuple[Hello, list[Event], DrafterVersion]:
    return HELLO, [], DrafterVersion(0, "/d/0", None, None)


def answer(offered: list[bytes], refusing: bool, request: httpx.Request) -> httpx.Response:
    route = request.url.path.rsplit("/", 1)[1]
    if route == "update":
        offered.append(request.content)
    if route not in ANSWERS:
        return httpx.Response(400, json={})
    return httpx.Response(401 if refusing and offered and route == "events" else 200, json=ANSWERS[route])


@pytest.mark.parametrize("refusing", [False, True], ids=["told", "refused by its server"])
def test_it_ends_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: bool) -> None:
    """refusing: once a drafter has arrived, the server knows the link's key no more."""
    offered: list[bytes] = []
    transport, retry = httpx.MockTransport(partial(answer, offered, refusing)), Retry(attempts=1)
    client: Callable[..., AsyncClient] = lambda url, **_: AsyncClient(url, transport=transport, retry=retry)  # noqa: E731
    monkeypatch.setattr(process, "AsyncClient", client)
    monkeypatch.setattr(process, "greeting", greeted)
    sender = Sender(Link(f"ipc://{tmp_path}/s", READS_TO_TRAINER), MODEL, lambda *_: None, chunk_bytes=CHUNK)
    sender.publish(1, 0, drafter(1))
    sending = threading.Thread(target=sender.run)
    sending.start()
    threads = threading.active_count()
    ours, theirs = Pipe()
    settings = idle(tmp_path / "drafters")._replace(address=f"ipc://{tmp_path}/s", name=HELLO.server)
    work = threading.Thread(target=ended, args=(process._follow_until_told(theirs, settings), said := []))
    work.start()
    try:
        until(lambda: offered)
        if not refusing:
            assert (tmp_path / "drafters" / "drafter-1.safetensors").exists()
            ours.send_bytes(b"")
        work.join(5)
        assert not work.is_alive()
        assert [type(error) for error in said] == ([ExceptionGroup] if refusing else [])
        assert not list((tmp_path / "drafters").iterdir())
        assert threading.active_count() == threads
    finally:
        sender.stop()
        sending.join()


def ended(work: Any, said: list[BaseException]) -> None:
    """Runs it; what it ends by, if it does."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as error:
        said.append(error)
