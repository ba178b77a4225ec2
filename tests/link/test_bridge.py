"""What the bridge says to either side; the server's answers are given by the test."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tlt_client import AsyncClient, DrafterTrainer, DrafterUpdate, Event, Retry
from tlt_client.schemas import DrafterVersion

from tests.wire.ends import HELLO
from tlt_server.link.bridge import Bridge
from tlt_server.wire import server
from tlt_server.wire.messages import Hello

LIVE = {
    "live": {"version": 1, "path": "/d/1", "trained_on": 0, "sha256": "ab"},
    "previous": None,
    "staging": None,
    "newest": 1,
    "frozen": False,
}
START = DrafterVersion(0, "/d/0", None, None)
READY = [DrafterUpdate(version=version, trained_on=0, path=f"/d/{version}") for version in range(6)]


class Routes:
    """A server's routes.

    answers: what each answers, in turn, the last one for ever; with a status, if it is not 200.
    asked: the bodies of the POSTs, the queries of the GETs.
    """

    def __init__(self, **answers: Any) -> None:
        quiet = {"events": [[]], "loads": [{"loads": []}], "update": [LIVE], "trainer": [{}], "share": [(400, {})]}
        quiet["drafter"] = [LIVE]
        self.answers: dict[str, list[Any]] = quiet | answers
        self.asked: dict[str, list[Any]] = {}
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.rsplit("/", 1)[1]
        self.asked.setdefault(route, []).append(json.loads(request.content) if request.content else request.url.query)
        if route == "update":
            await self.may_answer.wait()
        answers = self.answers[route]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, json=body)

    async def until(self, count: int, route: str) -> None:
        """Until a route was asked so often."""
        async with asyncio.timeout(10):
            while len(self.asked.get(route, [])) < count:
                await asyncio.sleep(0.005)


class Receiver(server.Receiver):
    """One without a link or files. said: its hellos. given: what it has for a trainer to begin with."""

    def __init__(self) -> None:
        self.hello, self.said, self.wants_times = HELLO, list[Hello](), False
        self.given: list[tuple[DrafterVersion, ...]] = []

    def gives(self, *drafters: DrafterVersion) -> None:
        self.given.append(drafters)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def change(self, **state: object) -> None:
        self.hello = msgspec.structs.replace(self.hello, **state)
        self.said.append(self.hello)
        self.hello = msgspec.structs.replace(self.hello, load=None)

    async def says(self, count: int = 1, **state: object) -> list[Hello]:
        """The first so many hellos that say so."""
        for _ in range(1000):
            found = [hello for hello in self.said if state.items() <= msgspec.structs.asdict(hello).items()]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.005)
        raise AssertionError(self.said)


def bridged(
    routes: Routes,
    script: Callable[[Receiver], Awaitable[None]],
    seen: int = 0,
    folder: Path = Path("/nowhere"),
    start: Path | None = None,
) -> None:
    async def both() -> None:
        receiver = Receiver()
        retry = Retry(attempts=1)
        async with AsyncClient("http://server", transport=httpx.MockTransport(routes), retry=retry) as client:
            bridge = Bridge(client, receiver, folder, [Event(seen, 0.0, "", 0, {})], START, start)
            running = asyncio.create_task(bridge.run())
            await script(receiver)
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled():
            running.result()

    asyncio.run(both())


def event(number: int, kind: str, replica: int = 0, **detail: Any) -> dict[str, Any]:
    return {"number": number, "time": 0.0, "kind": kind, "replica": replica, "detail": detail}


def test_events_change_what_is_told() -> None:
    happened = [
        event(4, "target_published", version=1, weight_version="step-1"),
        event(5, "target_published", version=2, weight_version=None),
        event(6, "drafter_swapped", version=3, from_version=0),
        event(7, "of a later version"),
        event(9, "drafter_rolled_back", version=0, from_version=3, why="it was asked for"),
    ]
    elsewhere = [event(n, "target_published", replica=1, version=n, weight_version="x") for n in range(3, 30)]
    routes = Routes(events=[happened[:2], httpx.ReadError("gone"), elsewhere, happened[2:], []])

    async def script(receiver: Receiver) -> None:
        await receiver.says(drafter_version=0, settled_drafter=3, reason="drafter 3: rolled back: it was asked for")
        hellos = [each for each in receiver.said if each.load is None]
        said = [(each.target_version, each.weight_version, each.drafter_version) for each in hellos]
        assert said[:2] == [(1, "step-1", 0), (2, "step-1", 0)]
        assert said[2:] == [(2, "step-1", 3), (2, "step-1", 0)]
        assert hellos[2].settled_drafter == hellos[2].newest_drafter == 3

    bridged(routes, script, seen=3)
    assert routes.asked["events"][:4] == [b"after=3", b"after=5", b"after=5", b"after=5"]


def test_the_active_drafter_is_what_a_trainer_may_begin_with() -> None:
    routes = Routes(events=[[], [event(1, "drafter_swapped", version=1, from_version=0)], []])

    async def script(receiver: Receiver) -> None:
        await receiver.says(drafter_version=1)
        await routes.until(1, "drafter")
        await asyncio.sleep(0.1)
        assert receiver.given == [(START, START), (DrafterVersion(1, "/d/1", 0, "ab"), START)]

    bridged(routes, script, start=Path("/d/0"))


def test_a_drafter_is_offered_but_not_what_was_overtaken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tlt_server")
    routes = Routes()
    routes.may_answer.clear()

    async def script(receiver: Receiver) -> None:
        receiver.told(READY[1])
        await asyncio.sleep(0.1)
        for ready in READY[2:5]:
            receiver.told(ready)
        await asyncio.sleep(0.1)
        routes.may_answer.set()
        await routes.until(2, "update")

    bridged(routes, script)
    assert routes.asked["update"] == [
        {"path": "/d/1", "version": 1, "trained_on": 0},
        {"path": "/d/4", "version": 4, "trained_on": 0},
    ]
    assert [f"drafter {version} is skipped" in caplog.text for version in range(1, 5)] == [False, True, True, False]


@pytest.mark.parametrize("status", [400, 401, 409, 500, 504])
def test_whatever_the_server_says_against_a_drafter_reaches_the_trainer(status: int) -> None:
    routes = Routes(update=[(status, {"message": "no drafter of mine"}), LIVE])

    async def script(receiver: Receiver) -> None:
        receiver.told(READY[1])
        (refused, *_) = await receiver.says(settled_drafter=1)
        assert refused.drafter_version == HELLO.drafter_version
        assert "no drafter of mine" in refused.reason
        receiver.told(READY[2])
        await routes.until(2, "update")

    bridged(routes, script)


def test_every_change_of_the_link_is_reported_once_and_in_order() -> None:
    routes = Routes(trainer=[httpx.ReadError("gone"), (503, {}), {}])

    async def script(receiver: Receiver) -> None:
        for connected, refused, received in ((True, None, None), (True, 1, None), (True, 1, 2), (False, 1, 2)):
            receiver.told(DrafterTrainer(address="ipc://t", connected=connected, refused=refused, received=received))
        await routes.until(6, "trainer")

    bridged(routes, script)
    told = [(each["connected"], each["refused"], each["received"]) for each in routes.asked["trainer"]]
    assert told[:3] == [(True, None, None)] * 3
    assert told[3:] == [(True, 1, None), (True, 1, 2), (False, 1, 2)]


@pytest.mark.slow
def test_what_is_shared_is_told_after_each_publication_while_there_is_a_trainer(tmp_path: Path) -> None:
    answers = [{"target_version": version, "path": f"/s/{version}"} for version in (0, 2)]
    routes = Routes(share=[answers[0], (409, {"message": "meanwhile"}), answers[1]])
    (tmp_path / "target-9").mkdir()

    async def script(receiver: Receiver) -> None:
        await asyncio.sleep(0.2)
        assert "share" not in routes.asked
        receiver.told(DrafterTrainer(address="ipc://t", connected=True))
        await receiver.says(target_version=0, shared="/s/0")
        for asked in (2, 3):
            told = event(asked, "target_published", version=asked - 1, weight_version="step")
            routes.answers["events"] = [[told], []]
            await routes.until(asked, "share")
        await receiver.says(target_version=2, shared="/s/2")

    bridged(routes, script, folder=tmp_path)
    named = [re.fullmatch(f"{tmp_path}/target-([0-9a-f]{{16}})-([0-9])", a["path"]) for a in routes.asked["share"]]
    assert [each and each[2] for each in named] == ["1", "2", "3"]
    assert len({each and each[1] for each in named}) == 1
    assert not list(tmp_path.iterdir())


def test_load() -> None:
    replicas = [{"num_running_reqs": 3, "num_waiting_reqs": 1}, {"num_running_reqs": 2, "num_waiting_reqs": 0}]

    async def script(receiver: Receiver) -> None:
        await receiver.says(load=6)

    bridged(Routes(loads=[{"loads": replicas}]), script)


def test_step_times_are_asked_for_while_the_trainer_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that decodes answers between its steps, which costs them time."""
    monkeypatch.setattr("tlt_server.link.bridge.TIMES_EVERY", 0.02)
    monkeypatch.setattr("tlt_server.link.bridge.LOAD_EVERY", 0.02)
    load = [{"num_running_reqs": 3, "num_waiting_reqs": 1}]
    routes = Routes(loads=[{"loads": load}], step_times=[{"decoded_s": 2.0, "usual_s": 1.5}])

    async def script(receiver: Receiver) -> None:
        receiver.told(DrafterTrainer(address="ipc://t", connected=True))
        await routes.until(5, "loads")
        assert "step_times" not in routes.asked
        receiver.wants_times = True
        await receiver.says(decoded_s=2.0, usual_s=1.5)
        receiver.told(DrafterTrainer(address="ipc://t", connected=False))
        await routes.until(len(routes.asked["loads"]) + 2, "loads")
        asked = len(routes.asked["step_times"])
        await routes.until(len(routes.asked["loads"]) + 5, "loads")
        assert len(routes.asked["step_times"]) == asked, "no trainer is there"

    bridged(routes, script)


@pytest.mark.slow
def test_load_says_whether_memory_is_lent() -> None:
    """As long as any of it is, whatever was released and resumed in how many calls."""
    released, some, rest = (
        event(number, kind, tags=tags)
        for number, kind, tags in (
            (1, "memory_released", "kv_cache weights"),
            (2, "memory_resumed", "weights"),
            (3, "memory_resumed", "kv_cache"),
        )
    )
    routes = Routes(events=[[released], [some], []])

    async def script(receiver: Receiver) -> None:
        await routes.until(4, "events")
        assert receiver.hello.lent
        routes.answers["events"] = [[rest], []]
        await routes.until(len(routes.asked["events"]) + 2, "events")
        assert not receiver.hello.lent

    bridged(routes, script)


def test_a_server_that_refuses_its_own_link_ends_it() -> None:
    async def script(receiver: Receiver) -> None:
        await asyncio.sleep(0.2)

    with pytest.raises(ExceptionGroup, match="TaskGroup") as failed:
        bridged(Routes(events=[(401, {})]), script)
    assert "401" in str(failed.value.exceptions[0])
