"""Between the receiver, which speaks with the trainer, and the server: drafters go in, what happened comes out."""

import asyncio
import logging
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from tlt_client import AsyncClient, DrafterTrainer, DrafterUpdate, Event, RequestUnserved, TltClientError

from tlt_server.link.sharing import Sharing
from tlt_server.wire.messages import (
    MAX_DEVICES,
    READS_FROM_RECEIVER,
    DrafterReady,
    DrafterRefused,
    DrafterSwapped,
    Hello,
    Load,
    ModelIdentity,
    Notice,
    TargetPublished,
    TrainerLink,
    decode,
    encode,
    short,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

EVENTS_EVERY = 0.1
LOAD_EVERY = 0.25
"""Seconds. Load is read where schedulers leave it for all who ask, in shared memory: no step waits for it."""

KEPT = 256
"""Of what the server has no time for now: a trainer may say more than that, and the last counts."""


class Greeting(NamedTuple):
    """A server's state. seen: number of its last event, later ones being on top of that state. lent: memory's tags."""

    hello: Hello
    seen: int = 0
    lent: frozenset[str] = frozenset()


async def greeting(client: AsyncClient, name: str, model: ModelIdentity) -> Greeting:
    """A server's state, as its routes tell it."""
    events = [event for event in await client.events() if event.replica == 0]
    lent: frozenset[str] = frozenset()
    for event in events:
        lent = lent_after(event, lent)
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


def lent_after(event: Event, lent: frozenset[str]) -> frozenset[str]:
    """Tags of the memory that is lent after an event."""
    tags = frozenset(str(event.detail.get("tags", "")).split())
    match event.kind:
        case "memory_released":
            return lent | tags
        case "memory_resumed":
            return lent - tags
    return lent


class Bridge:
    """Offers the server what arrives, and tells the trainer what becomes of it and what else happens.

    Under data parallelism it is told what the first replica says, as everybody is who asks for versions.

    client: of the server.
    receiver: the pipe to it.
    greeting: the server's state.
    address: of the trainer, for people.
    folder: on the server's machine, where it may write for the trainer.
    """

    def __init__(
        self, client: AsyncClient, receiver: Connection, greeting: Greeting, address: str, folder: Path
    ) -> None:
        self._client = client
        self._receiver = receiver
        self._seen, self._lent = greeting.seen, greeting.lent
        self._weight_version = greeting.hello.weight_version
        self._in_force = greeting.hello.drafter_version
        self._trainer = DrafterTrainer(address=address, connected=False)
        self._arrived: asyncio.Queue[DrafterReady] = asyncio.Queue()
        self._reports: asyncio.Queue[DrafterTrainer] = asyncio.Queue()
        self._sharing = Sharing(client, folder, self._tell)

    async def run(self) -> None:
        """Until it is cancelled, or the server refuses what it may not refuse."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._receiver.fileno(), self._hear)
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (self._offer(), self._follow(), self._weigh(), self._report(), self._sharing.run()):
                    tasks.create_task(work)
        finally:
            loop.remove_reader(self._receiver.fileno())

    # -- from the receiver to the server --

    def _hear(self) -> None:
        match decode([self._receiver.recv_bytes()], READS_FROM_RECEIVER)[0]:
            case DrafterReady() as ready:
                _put(self._arrived, ready)
                changes: dict[str, object] = {"received": ready.version}
            case DrafterRefused(version=version, reason=reason):
                changes = {"refused": version, "reason": reason}
            case TrainerLink(connected=connected):
                changes = {"connected": connected}
                self._sharing.trainer(connected)
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
                log.warning("drafter %d is not in force: %s", drafter.version, error)
                self._refuse(drafter.version, str(error))

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
                    self._pass_on(event)
            await asyncio.sleep(EVENTS_EVERY)

    def _pass_on(self, event: Event) -> None:
        self._lent = lent_after(event, self._lent)
        match event.kind:
            case "target_published":
                self._weight_version = short(str(event.detail["weight_version"] or self._weight_version))
                version = _number(event, "version")
                self._tell(TargetPublished(target_version=version, weight_version=self._weight_version))
                self._sharing.published()
            case "drafter_swapped":
                self._in_force = version = _number(event, "version")
                self._tell(DrafterSwapped(version=version, outcome="live", drafter_version=version))
            case "drafter_rolled_back":
                self._in_force = _number(event, "version")
                gone, why = _number(event, "from_version"), str(event.detail["why"])
                self._tell(
                    DrafterSwapped(version=gone, outcome="rolled_back", drafter_version=self._in_force, reason=why)
                )

    async def _weigh(self) -> None:
        while True:
            if load := await _served(self._client.load(), or_else=None):
                self._tell(Load(running=load.running, waiting=load.waiting, lent=bool(self._lent)))
            await asyncio.sleep(LOAD_EVERY)

    def _refuse(self, version: int, reason: str) -> None:
        self._tell(DrafterSwapped(version=version, outcome="refused", drafter_version=self._in_force, reason=reason))

    def _tell(self, notice: Notice) -> None:
        self._receiver.send_bytes(encode(notice))


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


def _number(event: Event, name: str) -> int:
    value = event.detail[name]
    assert isinstance(value, int)
    return value
