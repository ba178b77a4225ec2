"""Between the receiver, which speaks with the trainer, and the server: drafters go in, what happened comes out."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from tlt_client import AsyncClient, DrafterTrainer, DrafterUpdate, Event, RequestUnserved, TltClientError

from tlt_server.wire.messages import (
    MAX_DEVICES,
    DrafterRefused,
    DrafterSwapped,
    Hello,
    Load,
    ModelIdentity,
    Notice,
    TargetPublished,
    TargetShared,
    short,
)
from tlt_server.wire.server import DrafterReady, Told, TrainerLink

log = logging.getLogger(__name__)

T = TypeVar("T")

EVENTS_EVERY, LOAD_EVERY = 0.1, 0.25
"""Seconds. Load is read where schedulers leave it for all who ask, in shared memory: no step waits for it."""
KEPT = 256
"""Of what the server has no time for now: a trainer may say more than that, and the last counts."""
REST = 4.0
"""Times as long as sharing took, until it may begin again, so that it takes a fifth of the time at most; more, and the
trainer would wait for it longer. What was published meanwhile is skipped, but for the last."""


class Greeting(NamedTuple):
    """A server's state. seen: number of its last event, later ones being on top. lent: tags of released memory."""

    hello: Hello
    seen: int = 0
    lent: frozenset[str] = frozenset()


async def greeting(client: AsyncClient, name: str, model: ModelIdentity) -> Greeting:
    """As the server's routes tell it."""
    events = [event for event in await client.events() if event.replica == 0]
    lent: frozenset[str] = frozenset()
    for event in events:
        lent = _lent_after(event, lent)
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
    return Greeting(hello, max((event.number for event in events), default=0), lent)


class Bridge:
    """Under data parallelism it follows the first replica.

    Args:
        tell: the trainer.
        address: of the trainer, for people.
        folder: where the server may write for the trainer.
    """

    def __init__(
        self, client: AsyncClient, tell: Callable[[Notice], None], greeting: Greeting, address: str, folder: Path
    ) -> None:
        self._client, self._tell, self._folder = client, tell, folder
        self._seen, self._lent = greeting.seen, greeting.lent
        self._weight_version = greeting.hello.weight_version
        self._active = greeting.hello.drafter_version
        self._trainer = DrafterTrainer(address=address, connected=False)
        self._arrived: asyncio.Queue[DrafterReady] = asyncio.Queue()
        self._reports: asyncio.Queue[DrafterTrainer] = asyncio.Queue()
        self._is_shared, self._may_share = False, asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled, or the server refuses what it may not refuse."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._offer(), self._follow(), self._weigh(), self._report(), self._share()):
                tasks.create_task(work)

    # -- from the receiver to the server --

    def hear(self, told: Told) -> None:
        match told:
            case DrafterReady(version=version):
                _put(self._arrived, told)
                changes: dict[str, Any] = {"received": version}
            case DrafterRefused(version=version, reason=reason):
                changes = {"refused": version, "reason": reason}
            case TrainerLink(connected=connected):
                changes = {"connected": connected}
                self._may_share.set()
        before, self._trainer = self._trainer, msgspec.structs.replace(self._trainer, **changes)
        if self._trainer != before:
            _put(self._reports, self._trainer)

    async def _offer(self) -> None:
        while True:
            drafter = await self._arrived.get()
            while not self._arrived.empty():  # then this one's file is gone
                newer = self._arrived.get_nowait()
                self._refuse(drafter.version, f"version {newer.version} arrived before this one could be staged")
                drafter = newer
            try:
                await self._client.update_drafter(DrafterUpdate(drafter.path, drafter.version, drafter.trained_on))
            except TltClientError as error:
                log.warning("drafter %d is not active: %s", drafter.version, error)
                self._refuse(drafter.version, str(error))

    def _refuse(self, version: int, reason: str) -> None:
        self._tell(DrafterSwapped(version=version, outcome="refused", drafter_version=self._active, reason=reason))

    async def _report(self) -> None:
        while True:
            trainer = await self._reports.get()
            while await _served(self._client.report_trainer(trainer), or_else=False) is False:
                await asyncio.sleep(EVENTS_EVERY)

    # -- from the server to the receiver --

    async def _follow(self) -> None:
        while True:
            for event in await _served(self._client.events(self._seen), or_else=[]):
                if event.replica == 0 and event.number > self._seen:
                    self._seen = event.number
                    self._pass_on(event, event.detail)
            await asyncio.sleep(EVENTS_EVERY)

    def _pass_on(self, event: Event, detail: Any) -> None:
        self._lent = _lent_after(event, self._lent)
        match event.kind:
            case "target_published":
                self._weight_version = short(str(detail["weight_version"] or self._weight_version))
                self._tell(TargetPublished(target_version=detail["version"], weight_version=self._weight_version))
                self._is_shared = False
                self._may_share.set()
            case "drafter_swapped":
                self._active = detail["version"]
                self._tell(DrafterSwapped(version=self._active, outcome="live", drafter_version=self._active))
            case "drafter_rolled_back":
                gone, self._active, why = detail["from_version"], detail["version"], str(detail["why"])
                self._tell(
                    DrafterSwapped(version=gone, outcome="rolled_back", drafter_version=self._active, reason=why)
                )

    async def _weigh(self) -> None:
        while True:
            if load := await _served(self._client.load(), or_else=None):
                self._tell(Load(running=load.running, waiting=load.waiting, lent=bool(self._lent)))
            await asyncio.sleep(LOAD_EVERY)

    async def _share(self) -> None:
        """Has the server write what drafters share with each target, while there is a trainer to read it."""
        self._clear()  # an earlier life's
        numbers = count(1)
        try:
            while True:
                await self._may_share.wait()
                self._may_share.clear()
                if not self._trainer.connected or self._is_shared:
                    continue
                self._is_shared, began = True, time.monotonic()
                try:
                    shared = await self._client.share_target(str(self._folder / f"target-{next(numbers)}"))
                    self._tell(TargetShared(target_version=shared.target_version, path=shared.path))
                except TltClientError as error:
                    self._clear()
                    log.warning("the trainer gets no embedding and head of this target: %s", error)
                await asyncio.sleep(REST * (time.monotonic() - began))
        finally:
            self._clear()

    def _clear(self) -> None:
        for path in self._folder.glob("target-*"):
            shutil.rmtree(path)


def _lent_after(event: Event, lent: frozenset[str]) -> frozenset[str]:
    """Tags of the memory that is released after an event."""
    tags = frozenset(str(event.detail.get("tags", "")).split())
    match event.kind:
        case "memory_released":
            return lent | tags
        case "memory_resumed":
            return lent - tags
    return lent


def _put(queue: asyncio.Queue[T], item: T) -> None:
    """At the end; the first ones go where there are too many."""
    while queue.qsize() >= KEPT:
        queue.get_nowait()
    queue.put_nowait(item)


async def _served(asking: Awaitable[T], or_else: T) -> T:
    """The answer; something else where none came. A server that writes a large target, or ends, answers nobody."""
    try:
        return await asking
    except RequestUnserved as error:
        log.info("the server does not answer now: %s", error)
        return or_else
