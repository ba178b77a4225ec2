"""Probes of members, and how one that is stale gets the fleet's weights before it is sent a request."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from tlt_server.errors import ServerFailed
from tlt_server.fleet.control import Control
from tlt_server.fleet.links import Reply
from tlt_server.fleet.log import Entry, checksum
from tlt_server.fleet.members import Member, Seen, State
from tlt_server.fleet.transaction import Publication

START_S = 15.0
"""How long a front that was killed looks for a member that knows whether its last transaction was carried out."""
LONGEST_S = 60.0
"""Between two attempts to bring a member up to date."""
TURN_S = 0.25


class Upkeep:
    """A task for each member. told: is called whenever requests may go out that might not before."""

    def __init__(self, control: Control, told: Callable[[], None]) -> None:
        self._control, self._told = control, told
        self._fleet, self._links, self._limits = control.fleet, control.links, control.limits
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, tuple[int, float, str | None]] = {}

    def join(self, name: str, url: str) -> None:
        """Takes a member in, or learns where it is now."""
        self._fleet.join(name, url, time.time())
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(self._keep(name))

    def retire(self, name: str, why: str) -> None:
        self._fleet.retire(name, why, time.time())
        if task := self._tasks.pop(name, None):
            task.cancel()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # -- probes --

    async def _keep(self, name: str) -> None:
        while True:
            member = self._fleet.members[name]
            if name not in self._fleet.taking_part:
                await self._probe(member)
            if member.state is State.STALE and self._is_due(name):
                await self._bring(member)
            self._told()
            await asyncio.sleep(TURN_S if member.state is State.JOINING else self._limits.probe_every)

    async def _probe(self, member: Member) -> None:
        """What comes of it counts only if no transaction began meanwhile, and it is the same process still."""
        count, url = self._control.count, member.url
        seen, why, dead = None, "", False
        try:
            seen = await self._links.see(url, self._limits.probe)
        except ServerFailed as error:
            why, dead = str(error), not await self._links.listens(url)
        if count != self._control.count or url != member.url:
            return
        if seen is not None:
            self._fleet.answered(member.name, seen, time.time())
        else:
            self._fleet.silent(member.name, why, time.time(), dead=dead)

    # -- up to date --

    def _is_due(self, name: str) -> bool:
        _, at, version = self._attempts.get(name, (0, 0.0, None))
        return time.monotonic() >= at or version != self._fleet.version

    async def _bring(self, member: Member) -> None:
        """Gets it ready, or says why it is not; after each attempt that fails it has a longer rest."""
        control = self._control
        if control.running is not None and member.name in control.running.bodies:
            return
        control.loading.add(member.name)
        try:
            if self._fleet.version is not None and not self._fleet.under_way.wrote:
                await self._load(member)
                await self._settle(member)
            ready = await self._admit(member)
        except ServerFailed as error:
            ready, member.why = False, str(error)
        finally:
            control.loading.discard(member.name)
        tried = 0 if ready else self._attempts.get(member.name, (0,))[0] + 1
        rest = min(LONGEST_S, self._limits.probe_every * 2 ** min(tried - 1, 10)) if tried else 0.0
        self._attempts[member.name] = (tried, time.monotonic() + rest, self._fleet.version)

    async def _load(self, member: Member) -> None:
        """Has it read what was published last, if it lacks it. ServerFailed: it cannot."""
        seen = await self._links.see(member.url, self._limits.probe)
        if self._fleet.fits(seen):
            return
        if seen.model != self._fleet.model:
            raise ServerFailed(self._fleet.lack(seen))
        if self._fleet.publications == 0 and seen.publications == 0:  # its own weights are the fleet's
            await self._tell(member, "POST", "/update_weight_version", new_version=self._fleet.version)
            return
        past = self._control.log.past
        if past.path is None or past.checksum is None:
            raise ServerFailed(f"{self._fleet.lack(seen)}; it gets them by the next publication")
        if await asyncio.to_thread(checksum, past.path) != past.checksum:
            raise ServerFailed(f"{past.path} is not what was published; it gets its weights by the next publication")
        await self._ask(member, "POST", "/continue_generation", b"{}")  # it may be paused since it left
        named = {"model_path": past.path, "weight_version": self._fleet.version, "flush_cache": True}
        await self._tell(member, "POST", "/update_weights_from_disk", **named)

    async def _settle(self, member: Member) -> None:
        """What else members have been told, and what one of them has learned of its arms."""
        for method, target, body in list(self._control.log.past.settings.values()):
            reply = await self._ask(member, method, target, body.encode())
            if not reply.ok:  # a drafter that is gone, say: it costs speed, and nothing else
                self._fleet.tell("setting_refused", member.name, f"{target}: {reply.status}", time.time())
        other = next((each for each in self._fleet.ready() if each is not member), None)
        if other is not None:
            learned = await self._ask(other, "GET", "/tlt/v1/strategy/learned")
            if learned.ok:
                await self._ask(member, "PUT", "/tlt/v1/strategy/learned", learned.body)

    async def _admit(self, member: Member) -> bool:
        """Between two transactions: what it says now holds until it is sent a request."""
        async with self._control.lock:
            under_way = self._fleet.under_way
            if member.state is not State.STALE:
                return member.state is State.READY
            if under_way.wrote or under_way.opened:
                member.why = "waits for the end of the publication that is under way"
                return False
            if under_way.paused:
                await self._done(member, "POST", "/pause_generation", b'{"mode":"in_place"}')
            else:
                await self._ask(member, "POST", "/continue_generation", b"{}")
            seen = await self._links.see(member.url, self._limits.probe)
            return self._fleet.admit(member.name, seen, time.time())

    async def _tell(self, member: Member, method: str, target: str, **fields: object) -> None:
        await self._done(member, method, target, msgspec.json.encode(fields))

    async def _done(self, member: Member, method: str, target: str, body: bytes) -> None:
        reply = await self._ask(member, method, target, body)
        if not reply.ok:
            raise ServerFailed(f"{target} is answered {reply.status}: {reply.body[:300].decode(errors='replace')}")

    async def _ask(self, member: Member, method: str, target: str, body: bytes | None = None) -> Reply:
        return await self._links.ask(member.url, method, target, body, within_s=self._limits.call)

    # -- after a kill --

    async def recall(self) -> None:
        """What the log says of the fleet. Where its last transaction was cut off, the members say whether it was
        carried out; until they have, nothing goes out."""
        fleet, past = self._fleet, self._control.log.past
        fleet.version, fleet.publications, fleet.model = past.version, past.publications, past.model
        if past.doubt is None:
            return
        async with self._control.lock:
            self._control.recalling = True
            self._resolve(past.doubt, await self._found(past.doubt))
            self._control.recalling = False
        self._told()

    def _resolve(self, entry: Entry, found: list[Seen]) -> None:
        """One of the same name as before proves nothing: then the trainer, whose call broke, is waited for."""
        past, meant = self._control.log.past, Publication(**entry.under_way)
        was = self._fleet.under_way
        paused, opened = was.paused and meant.paused, was.opened and meant.opened
        if entry.version != past.version and any(seen.whole and seen.weight_version == entry.version for seen in found):
            past.read(msgspec.structs.replace(entry, phase="commit"))
            self._fleet.version, self._fleet.publications = entry.version, entry.publications
            self._fleet.model = entry.model
            self._fleet.under_way = Publication(meant.paused, meant.opened)
        elif entry.version == past.version and entry.publications > past.publications:
            self._fleet.under_way = meant._replace(paused=paused, opened=opened)
        else:
            open_write = entry.version == past.version and meant.wrote
            self._fleet.under_way = was._replace(paused=paused, opened=opened, wrote=was.wrote or open_write)
        self._fleet.tell("recalled", None, f"{entry.call}: the fleet has {self._fleet.version!r}", time.time())

    async def _found(self, entry: Entry) -> list[Seen]:
        """What the members of a transaction say, once all have answered, or one has what it was to bring."""
        until, found = time.monotonic() + START_S, dict[str, Seen]()
        while time.monotonic() < until:
            urls = {name: member.url for name, member in self._fleet.members.items() if name not in found}
            asking = (self._links.see(url, self._limits.probe) for url in urls.values())
            answers = await asyncio.gather(*asking, return_exceptions=True)
            found |= {name: seen for name, seen in zip(urls, answers, strict=True) if isinstance(seen, Seen)}
            if set(entry.members) <= found.keys() or any(
                seen.weight_version == entry.version for seen in found.values()
            ):
                break
            await asyncio.sleep(TURN_S)
        return list(found.values())
