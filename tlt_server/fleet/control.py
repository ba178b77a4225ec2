"""Runs control calls as transactions: one at a time, on all members, logged before it begins and when it is over."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from hashlib import sha256
from typing import Any

import msgspec

from tlt_server.errors import BadRequest, DiskFailed, ServerFailed
from tlt_server.fleet.calls import (
    NAMED_BY_CALL,
    Call,
    Said,
    broadcast,
    called,
    folder_of,
    for_ranks,
    merged,
    name_of,
    naming,
    said,
)
from tlt_server.fleet.kept import Keeper
from tlt_server.fleet.links import Limits, Links, Reply, refusal
from tlt_server.fleet.log import Entry, Log, checksum
from tlt_server.fleet.members import Ending, Fleet
from tlt_server.fleet.running import Running, answer_of
from tlt_server.fleet.transaction import Answer, Kind, Transaction

AGAIN_S = 0.2


class Control:
    """The one place that changes members. told: is called whenever requests may go out that might not before."""

    def __init__(self, fleet: Fleet, links: Links, log: Log, limits: Limits, told: Callable[[], None]) -> None:
        self.fleet, self.links, self.log, self.limits = fleet, links, log, limits
        fleet.under_way = log.past.under_way
        self.running: Running | None = None
        self.lock = asyncio.Lock()
        self.count = 0
        """Of transactions that have begun: what was heard before one began says nothing after it."""
        self.loading: set[str] = set()
        """Members that are brought up to date just now, and so no passengers."""
        self.recalling = False
        """Whether it is not known yet what came of the last transaction of a front that was killed."""
        self.keeper: Keeper | None = None
        """Who receives broadcasts in the members' place."""
        self._told = told
        self._groups: dict[str, tuple[str, ...]] = {}
        self._joined: dict[tuple[str, str, bytes], asyncio.Task[Reply]] = {}

    async def close(self) -> None:
        """Cuts off what is under way, as a kill would: a front that starts anew asks the members what came of it."""
        tasks = list(self._joined.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def holds(self) -> bool:
        """Whether no request may go out."""
        return self.recalling or self.fleet.holds

    async def call(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """A control call's answer. The same call while it is under way gets its answer, too; it goes on to its end if
        its callers go away."""
        key = (method, target, sha256(body).digest())
        if key not in self._joined:
            self._joined[key] = task = asyncio.ensure_future(self._answer(method, target, body, headers))
            task.add_done_callback(lambda _: self._joined.pop(key))
        return await asyncio.shield(self._joined[key])

    async def _answer(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        async with self.lock:
            try:
                if self.keeper is not None and (
                    kept := await self._by_keeper(self.keeper, method, target, body, headers)
                ):
                    return kept
                return await self._carried_out(await self._begun(method, target, body, headers))
            except BadRequest as error:
                return refusal(400, str(error))
            except (DiskFailed, ServerFailed) as error:
                return refusal(409, str(error))
            finally:
                self.fleet.applied, self.fleet.taking_part, self.running = None, frozenset(), None
                self._told()

    async def _by_keeper(
        self, keeper: Keeper, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply | None:
        """The answer to what the keeper does; None: members are still to be asked. Either way they have read first what
        it holds, if this call ends a publication; where they could not, that is the answer."""
        told = said(body)
        call = called(method, target.partition("?")[0], told)
        assert call is not None
        reply = await keeper.answer(call, method, target, body, told, headers)
        if (reply is None or reply.ok) and keeper.publishes(call.kind, paused=self.fleet.under_way.paused):
            path, reading = await keeper.whole()
            done = await self._carried_out(await self._begun("POST", "/update_weights_from_disk", reading, headers))
            if (why := await keeper.settle(path, refused=not done.ok)) is not None:
                self.fleet.tell("keeper_failed", None, why, time.time())
            if not done.ok:
                return done
            if reply is not None:
                lost = msgspec.json.decode(done.body).get("quarantined", ())
                reply = reply._replace(body=merged("", [reply.body], lost))
        return reply

    # -- begin --

    async def _begun(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Running:
        path, told = target.partition("?")[0], said(body)
        call = called(method, path, told)
        assert call is not None
        members = [member.name for member in self.fleet.in_service()]
        passengers = [member.name for member in self.fleet.waiting() if member.name not in self.loading]
        if not members and not passengers:
            raise ServerFailed("no member is in service: GET /tlt/v1/fleet says why; nothing was changed")
        source = await self._source(path, told) if call.kind is Kind.WRITE else (None, None)
        after, over = self.fleet.under_way.after(call.kind, name_of(told), source)
        version = (after.named or f"fleet-{self.fleet.publications + 1}") if over else self.fleet.version
        if over and not after.named and path in NAMED_BY_CALL:
            body, after = naming(body, str(version)), after._replace(named=version)
        if broadcast(path, told):
            members, passengers = self._in_group(told, members, passengers)
        bodies = await self._bodies(call, body, told, [*members, *passengers])
        plan = Transaction(call.kind, members, passengers, self.fleet.min_ready)
        self.running = Running(
            call, method, target, path, headers, bodies, broadcast(path, told), plan, time.time(),
            self.fleet.under_way, Ending(after, over, version),
        )  # fmt: skip
        return self.running

    async def _source(self, path: str, told: Said) -> tuple[str | None, str | None]:
        folder = folder_of(path, told)
        return (None, None) if folder is None else (folder, await asyncio.to_thread(checksum, folder))

    def _in_group(self, told: Said, members: list[str], passengers: list[str]) -> tuple[list[str], list[str]]:
        """Who receives a broadcast: its group, whole. ServerFailed: one of it is gone, and it would not end."""
        group = self._groups.get(told.group_name or "")
        if group is None:
            return members, passengers
        if gone := [name for name in group if name not in members and name not in passengers]:
            raise ServerFailed(
                f"{', '.join(gone)} left the trainer's group: its broadcast would not end. Init it again"
            )
        return [name for name in members if name in group], [name for name in passengers if name in group]

    async def _bodies(self, call: Call, body: bytes, told: Said, names: list[str]) -> dict[str, bytes]:
        if call.kind is not Kind.GROUP:
            return dict.fromkeys(names, body)
        urls = [self.fleet.members[name].url for name in names]
        worlds = await asyncio.gather(*(self.links.world(url, self.limits.probe) for url in urls))
        return dict(zip(names, for_ranks(body, told, worlds), strict=True))

    # -- prepare, apply, undo --

    async def _carried_out(self, running: Running) -> Reply:
        plan = running.plan
        await self._each(plan, self._prepare)
        if plan.applies:
            await self._write("apply", running, running.end.version, self.fleet.publications + running.writes)
            self.count += 1
            self.fleet.apply(plan)
            await self._each(plan, self._apply)
            if plan.undoes:
                await self._each(plan, self._undo)
            await self._concluded(running)
        else:
            self._quarantine(plan)
        return answer_of(running, self.fleet.min_ready)

    async def _each(self, plan: Transaction, ask: Callable[[str], Coroutine[Any, Any, tuple[Answer, str]]]) -> None:
        """Siblings are never cancelled: they may be in the middle of a collective."""
        names = sorted(plan.to_ask())
        for name, (answer, why) in zip(names, await asyncio.gather(*map(ask, names)), strict=True):
            plan.answer(name, answer, why)

    async def _prepare(self, name: str) -> tuple[Answer, str]:
        """Whether it answers at all; what it would refuse, it refuses without a change."""
        return await self._asked(name, "GET", "/get_weight_version", None, self.limits.probe)

    async def _apply(self, name: str) -> tuple[Answer, str]:
        running = self.running
        assert running is not None
        unnamed = running.end.over and running.end.after.named is None
        named: tuple[Answer, str] = (Answer.OK, "")
        if unnamed and running.call.kind is Kind.RESUME:
            named = await self._name(name, str(running.end.version))
        within = None if running.broadcast or running.call.kind is Kind.GROUP else self.limits.call
        answer, why = await self._asked(name, running.method, running.target, running.bodies[name], within, keep=True)
        if answer is Answer.OK and unnamed and running.call.kind is not Kind.RESUME:
            named = await self._name(name, str(running.end.version))
        if answer is not Answer.OK or not running.end.over:
            return answer, why
        return await self._has(name, str(running.end.version)) if named[0] is Answer.OK else (Answer.FAILED, named[1])

    async def _name(self, name: str, version: str) -> tuple[Answer, str]:
        body = msgspec.json.encode({"new_version": version, "abort_all_requests": False})
        return await self._asked(name, "POST", "/update_weight_version", body, self.limits.call)

    async def _has(self, name: str, version: str) -> tuple[Answer, str]:
        """Whether it says that it has these weights: an answer of 200 alone does not."""
        try:
            found = self.fleet.members[name].seen = await self.links.see(self.fleet.members[name].url, self.limits.call)
        except ServerFailed as error:
            return Answer.FAILED, str(error)
        came = found.publications > 0 or self.running is None or not self.running.writes
        if found.weight_version == version and found.whole and came:
            return Answer.OK, ""
        return Answer.FAILED, f"has {found.weights} after {version!r} was published"

    async def _undo(self, name: str) -> tuple[Answer, str]:
        running = self.running
        assert running is not None
        if running.call.undo is None or (running.before == running.end.after and running.call.kind is not Kind.GROUP):
            return Answer.OK, ""  # it was so before
        route, body = running.call.undo
        if group := said(running.bodies[name]).group_name:
            body = msgspec.json.encode({"group_name": group})
        return await self._asked(name, "POST", route, body, self.limits.call)

    async def _asked(
        self, name: str, method: str, target: str, body: bytes | None, within: float | None, *, keep: bool = False
    ) -> tuple[Answer, str]:
        """A resume is repeated while its member lives: one that was lost would leave it paused."""
        running, url = self.running, self.fleet.members[name].url
        assert running is not None
        until = time.monotonic() + (within or 0)
        while True:
            try:
                reply = await self.links.ask(url, method, target, body, running.headers, within)
                break
            except ServerFailed as error:
                again = keep and running.call.kind is Kind.RESUME and time.monotonic() < until
                if not again or not await self.links.listens(url):
                    return Answer.FAILED, str(error)
                await asyncio.sleep(AGAIN_S)
        if keep or not reply.ok:
            running.replies[name] = reply
        if reply.ok:
            return Answer.OK, ""
        said = reply.body[:300].decode(errors="replace")
        return Answer.REFUSED if reply.status < 500 or reply.status == 501 else Answer.FAILED, f"{reply.status}: {said}"

    # -- commit --

    async def _concluded(self, running: Running) -> None:
        """What came of it holds from here on, for requests and in the log."""
        plan, now = running.plan, time.time()
        if running.path == "/wake_up" and not all(b'"awake"' in running.replies[name].body for name in plan.done):
            running.end = running.end._replace(partly=True)  # only memory came back
        done = self.fleet.conclude(plan, running.end, now)
        if done and running.writes:
            self.log.past.path, self.log.past.checksum = running.end.after.path, running.end.after.checksum
        if done and running.call.kind in (Kind.GROUP, Kind.LEAVE):
            self._group(running)
        try:
            await self._write("commit", running, self.fleet.version, self.fleet.publications, kept=done)
        except DiskFailed as error:  # what was done is done; a front that starts anew asks the members
            self.fleet.tell("log_failed", None, str(error), now)

    def _group(self, running: Running) -> None:
        name = said(next(iter(running.bodies.values()))).group_name or ""
        if running.call.kind is Kind.LEAVE:
            self._groups.pop(name, None)
        else:
            self._groups[name] = tuple(each for each in running.bodies if each in running.plan.done)

    def _quarantine(self, plan: Transaction) -> None:
        for name, why in plan.lost.items():
            self.fleet.quarantine(name, why, time.time())

    async def _write(
        self, phase: str, running: Running, version: str | None, publications: int, *, kept: bool = False
    ) -> None:
        past, applying = self.log.past, phase == "apply"
        source = running.end.after if applying and running.writes else past
        setting = (running.method, running.target, next(iter(running.bodies.values())).decode(errors="replace"))
        entry = Entry(
            number=past.number + 1,
            time=time.time(),
            phase=phase,
            call=f"{running.method} {running.path}",
            members=sorted(running.bodies if applying else running.plan.done),
            version=version,
            publications=publications,
            model=self.fleet.model,
            path=source.path,
            checksum=source.checksum,
            under_way=(running.end.after if applying else self.fleet.under_way)._asdict(),
            setting=setting if kept and running.call.kept else None,
        )
        await asyncio.to_thread(self.log.write, entry)
