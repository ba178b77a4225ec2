"""Between the receiver, which speaks with the trainer, and the server: drafters go in, what happened comes out."""

import asyncio
import logging
import secrets
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tlt_client import AsyncClient, DrafterTrainer, DrafterUpdate, Event, RequestUnserved, TltClientError
from tlt_client.schemas import DrafterVersion

from tlt_server.wire.messages import MAX_DEVICES, Hello, ModelIdentity, short
from tlt_server.wire.server import Receiver

log = logging.getLogger(__name__)

EVENTS_EVERY, LOAD_EVERY, TIMES_EVERY = 0.1, 0.25, 1.0
"""Seconds. Load is read where schedulers leave it for all who ask, in shared memory: no step waits for it."""
KEPT = 256
"""Of what the server has no time for now: a trainer may say more than that, and the last counts."""
NO_DRAFTER = DrafterVersion(0, "", None, None)
REST = 1.0
"""Times as long as sharing took, until it may begin again while requests run, so that it takes half of their time at
most; more, and the trainer would wait for it longer. What was published meanwhile is skipped, but for the last."""


async def greeting(client: AsyncClient, name: str, model: ModelIdentity) -> tuple[Hello, list[Event], DrafterVersion]:
    """The server's state as its routes tell it, its events until then, later ones being on top, and its drafter."""
    events = await client.events()
    status = await client.status()
    versions = status.versions
    assert versions is not None
    assert versions.drafter is not None
    hello = Hello(
        server=name,
        model=model,
        target_version=versions.target.version,
        weight_version=short(versions.target.weight_version),
        drafter_version=versions.drafter.live.version,
        newest_drafter=versions.drafter.newest,
        devices=tuple(status.devices)[:MAX_DEVICES],
    )
    return hello, events, versions.drafter.live


class Bridge:
    """Under data parallelism it follows the first replica.

    past: events that the receiver's hello tells of already.
    folder: where the server may write for the trainer.
    live, start: the active drafter, and the folder of the one that the server was started with.
    """

    def __init__(
        self,
        client: AsyncClient,
        receiver: Receiver,
        folder: Path,
        past: Sequence[Event] = (),
        live: DrafterVersion = NO_DRAFTER,
        start: Path | None = None,
    ) -> None:
        self._client, self._receiver, self._folder = client, receiver, folder
        self._seen, self._lent = 0, frozenset[str]()
        for event in past:
            self._note(event, is_past=True)
        self._start = start
        self._gives(live)
        receiver.told = self.hear
        self._drafters: asyncio.Queue[DrafterUpdate] = asyncio.Queue()
        self._reports: deque[DrafterTrainer] = deque(maxlen=KEPT)
        self._is_connected = False
        self._load: int | None = None

    async def run(self) -> None:
        """Until it is cancelled, or the server refuses what it may not refuse."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receiver.run())
            tasks.create_task(self._offer())
            tasks.create_task(self._share())
            tasks.create_task(_repeat(self._follow, EVENTS_EVERY))
            tasks.create_task(_repeat(self._report, EVENTS_EVERY))
            tasks.create_task(_repeat(self._weigh, LOAD_EVERY))
            tasks.create_task(_repeat(self._time, TIMES_EVERY))

    # -- from the receiver to the server --

    def hear(self, told: DrafterUpdate | DrafterTrainer) -> None:
        """What the receiver tells."""
        if isinstance(told, DrafterUpdate):
            self._drafters.put_nowait(told)
        else:
            self._is_connected = told.connected
            self._reports.append(told)

    async def _offer(self) -> None:
        while True:
            drafter = await self._drafters.get()
            while not self._drafters.empty():  # then this one's file is gone
                log.info("drafter %s is skipped: a newer one has arrived", drafter.version)
                drafter = self._drafters.get_nowait()
            try:
                await self._client.update_drafter(drafter)
            except TltClientError as error:
                log.warning("drafter %s is not active: %s", drafter.version, error)
                self._receiver.settle(drafter.version or 0, str(error))

    async def _report(self) -> None:
        while self._reports:
            await self._client.report_trainer(self._reports[0])
            self._reports.popleft()

    # -- from the server to the receiver --

    async def _follow(self) -> None:
        for event in await self._client.events(self._seen):
            self._note(event)
        if self._start is not None and self._given != self._receiver.hello.drafter_version:
            self._gives((await self._client.drafter()).live)

    def _gives(self, live: DrafterVersion) -> None:
        """To a trainer that has none to begin with."""
        self._given = live.version
        if self._start is not None:
            self._receiver.gives(live, DrafterVersion(0, str(self._start), None, None))

    def _note(self, event: Event, *, is_past: bool = False) -> None:
        if event.replica != 0 or event.number <= self._seen:
            return
        self._seen = event.number
        receiver = self._receiver
        detail: Any = event.detail
        match event.kind:
            case "memory_released" | "memory_resumed":
                tags = frozenset(str(detail.get("tags", "")).split())
                self._lent = self._lent | tags if event.kind == "memory_released" else self._lent - tags
                receiver.change(lent=bool(self._lent))
            case _ if is_past:
                pass  # the hello tells of it
            case "target_published":
                name = short(str(detail["weight_version"] or receiver.hello.weight_version))
                receiver.change(target_version=detail["version"], weight_version=name, shared="")
            case "drafter_swapped":
                version = detail["version"]
                newest = max(version, receiver.hello.newest_drafter)
                receiver.settle(version, drafter_version=version, newest_drafter=newest)
            case "drafter_rolled_back":
                why = f"rolled back: {detail['why']}"
                receiver.settle(detail["from_version"], why, drafter_version=detail["version"])

    async def _weigh(self) -> None:
        load = await self._client.load()
        self._load = load.running + load.waiting
        self._receiver.change(load=self._load)

    async def _time(self) -> None:
        """What steps took, for a trainer that goes by it: a server that decodes answers between two of them."""
        if self._receiver.wants_times and self._is_connected and self._load:
            found = await self._client.step_times()
            self._receiver.change(decoded_s=found.decoded_s, usual_s=found.usual_s)

    async def _share(self) -> None:
        """Has the server write what drafters share with each target, while there is a trainer to read it."""
        self._clear()  # an earlier life's
        # a name that no other link chooses: where a trainer finds it, it is this one
        done, numbers, token = -1, count(1), secrets.token_hex(8)
        rests_until = 0.0
        try:
            while True:
                hello, began = self._receiver.hello, time.monotonic()
                may = self._load == 0 or began >= rests_until
                if self._is_connected and hello.target_version > done and may:
                    await self._share_one(str(self._folder / f"target-{token}-{next(numbers)}"))
                    done, now = hello.target_version, time.monotonic()
                    rests_until = now + REST * (now - began)
                await asyncio.sleep(EVENTS_EVERY)
        finally:
            self._clear()

    async def _share_one(self, path: str) -> None:
        try:
            shared = await self._client.share_target(path)
            if shared.target_version == self._receiver.hello.target_version:
                self._receiver.change(shared=shared.path)
        except TltClientError as error:
            self._clear()
            log.warning("the trainer gets no embedding and head of this target: %s", error)

    def _clear(self) -> None:
        for path in self._folder.glob("target-*"):
            shutil.rmtree(path)


async def _repeat(work: Callable[[], Awaitable[None]], every: float) -> None:
    """For ever, whether or not it is answered: a server that writes a large target, or ends, answers nobody."""
    while True:
        try:
            await work()
        except RequestUnserved as error:
            log.info("the server does not answer now: %s", error)
        await asyncio.sleep(every)
