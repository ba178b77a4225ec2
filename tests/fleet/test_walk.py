"""All interleavings of small fleets: transactions, kills, restarts, lost answers, requests, in every order.

The world beside the fleet knows what weights each member really has. Whatever happens: a request that goes out is
sampled by the fleet's weights, or refused by its header; nobody generates on other weights than the fleet's; and a
fleet that is paused can resume.
"""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tlt_server.fleet.members import Ending, Fleet, Seen, State
from tlt_server.fleet.transaction import Answer, Kind, Outcome, Phase, Transaction


class Real(NamedTuple):
    """A member's process. version: of its weights, 0 those that it started with."""

    alive: bool = True
    version: int = 0
    paused: bool = False


@dataclass
class World:
    """A fleet, its members' processes, and the transaction under way with what it is to bring."""

    fleet: Fleet
    real: dict[str, Real]
    plan: Transaction | None = None
    end: Ending | None = None
    lives: int = 1
    """Kills that are left."""
    publications: int = 1
    """That a walk is bounded by."""
    trail: tuple[str, ...] = ()

    def key(self) -> tuple[object, ...]:
        members = tuple((m.state, m.silent, m.seen) for m in self.fleet.members.values())
        plan = self.plan and (self.plan.kind, self.plan.phase, tuple(sorted(self.plan._answers.items())),
                              tuple(sorted(self.plan.lost)), tuple(sorted(self.plan.done)), self.plan.members,
                              self.plan.passengers, tuple(sorted(self.plan._out)))  # fmt: skip
        known = (self.fleet.version, self.fleet.publications, self.fleet.under_way, self.fleet.applied is not None)
        return members, plan, self.end, known, tuple(self.real.values()), self.lives

    def seen(self, name: str) -> Seen:
        version = self.real[name].version
        return Seen(str(version), publications=min(version, 1), model="m")


def start(count: int, min_ready: int = 1, *, lives: int, publications: int) -> World:
    names = [chr(ord("a") + i) for i in range(count)]
    world = World(Fleet(min_ready), {name: Real() for name in names}, lives=lives, publications=publications)
    for name in names:
        world.fleet.join(name, name, 0)
        world.fleet.answered(name, world.seen(name), 0)
        assert world.fleet.admit(name, world.seen(name), 0)
    return world


def steps(world: World) -> Iterator[World]:
    """Every world that this one may become next."""
    for name, real in world.real.items():
        yield from _alone(world, name, real)
        if world.plan is not None and name in world.plan.to_ask():
            yield from _asked(world, name, real)
    if world.plan is None:
        yield from _begun(world)


def _copy(world: World) -> World:
    """As deep as need be: copy.deepcopy takes most of a walk's time."""
    fleet, plan = copy.copy(world.fleet), copy.copy(world.plan)
    fleet.members = {name: copy.copy(member) for name, member in fleet.members.items()}
    fleet.events = []
    if plan is not None:
        plan.lost, plan._answers, plan._out = dict(plan.lost), dict(plan._answers), set(plan._out)
        fleet.applied = plan if fleet.applied is not None else None
    return World(fleet, dict(world.real), plan, world.end, world.lives, world.publications, world.trail)


def _next(world: World, what: str) -> World:
    after = _copy(world)
    after.trail = (*world.trail, what)
    return after


def _alone(world: World, name: str, real: Real) -> Iterator[World]:
    """What befalls a member, and what the front does about it between two transactions."""
    if real.alive and world.lives:
        after = _next(world, f"{name} is killed")
        after.real[name], after.lives = Real(alive=False), world.lives - 1
        yield after
    if not real.alive:
        after = _next(world, f"{name} is started anew")
        after.real[name] = Real()
        yield after
    after = _next(world, f"{name} is probed")
    if real.alive:
        after.fleet.answered(name, after.seen(name), 0)
    else:
        after.fleet.silent(name, "", 0, dead=True)
    yield after
    idle = world.plan is None and not (world.fleet.under_way.wrote or world.fleet.under_way.opened)
    if real.alive and idle and world.fleet.members[name].state is State.STALE:
        after = _next(world, f"{name} is brought up to date")
        version = int(after.fleet.version or 0)
        after.real[name] = Real(True, version, after.fleet.under_way.paused)
        assert after.fleet.admit(name, after.seen(name), 0)
        yield after


def _begun(world: World) -> Iterator[World]:
    for kind in (Kind.PAUSE, Kind.RESUME, Kind.WRITE):
        if kind is Kind.WRITE and (world.fleet.publications >= world.publications or world.fleet.under_way.wrote):
            continue
        if world.fleet.in_service() or world.fleet.waiting():
            yield _one(world, kind)


def _one(world: World, kind: Kind) -> World:
    after = _next(world, f"{kind} begins")
    fleet = after.fleet
    members, riders = [m.name for m in fleet.in_service()], [m.name for m in fleet.waiting()]
    under_way, over = fleet.under_way.after(kind, None, (None, None))
    version = str(fleet.publications + 1) if over else fleet.version
    after.plan = Transaction(kind, members, riders, fleet.min_ready)
    after.end = Ending(under_way, over, version)
    return after


def _asked(world: World, name: str, real: Real) -> Iterator[World]:
    """A member's answers: well; lost after it was done; refused; none, for it is dead."""
    plan = world.plan
    assert plan is not None
    if not real.alive:
        yield _answered(world, name, Answer.FAILED, done=False)
        return
    yield _answered(world, name, Answer.OK, done=True)
    if plan.phase is Phase.APPLY:
        yield _answered(world, name, Answer.FAILED, done=True)
        yield _answered(world, name, Answer.REFUSED, done=False)


def _answered(world: World, name: str, answer: Answer, *, done: bool) -> World:
    after = _next(world, f"{name} answers {answer}, {'done' if done else 'not done'}")
    plan, end = after.plan, after.end
    assert plan is not None
    assert end is not None
    if done and plan.phase is Phase.APPLY:
        if plan.kind is Kind.WRITE:
            after.real[name] = after.real[name]._replace(version=after.fleet.publications + 1)
        else:
            after.real[name] = after.real[name]._replace(paused=plan.kind is Kind.PAUSE)
    if done and plan.phase is Phase.UNDO and not after.fleet.under_way.paused:
        after.real[name] = after.real[name]._replace(paused=False)
    ok_but_not_there = answer is Answer.OK and plan.phase is Phase.APPLY and end.over and (
        str(after.real[name].version) != end.version
    )  # fmt: skip
    before = plan.phase
    plan.answer(name, Answer.FAILED if ok_but_not_there else answer)
    if before is Phase.PREPARE and plan.applies:
        after.fleet.apply(plan)
    if plan.phase is Phase.DONE:
        _concluded(after, plan, end)
    return after


def _concluded(world: World, plan: Transaction, end: Ending) -> None:
    before, was = world.fleet.version, world.fleet.under_way
    done = world.fleet.conclude(plan, end, 0)
    assert done is (plan.outcome in (Outcome.COMMITTED, Outcome.SCARCE))
    if done:
        for member in world.fleet.in_service():
            assert member.name in plan.done, "in service without having done it"
    else:
        assert (world.fleet.version, world.fleet.under_way) == (before, was), "refused, and yet changed"
    world.plan = world.end = None


def check(world: World) -> None:
    fleet = world.fleet
    versions = set()
    for name, real in world.real.items():
        if not fleet.may_send(name):
            continue
        anew = real.version == 0 and fleet.publications > 0  # a process that the front has not noticed; refused by
        if real.alive and not anew:  # the header of its request, for it has the name of before any publication
            versions.add(real.version)
            assert str(real.version) == fleet.version, world.trail
            assert not real.paused or not _knows(fleet, name), world.trail
    assert len(versions) <= 1, f"torn: {world.trail}"
    if fleet.applied is None:
        assert not fleet.taking_part, world.trail


def _knows(fleet: Fleet, name: str) -> bool:
    return not fleet.under_way.paused and fleet.members[name].state is State.READY


def can_resume(world: World) -> bool:
    """Whether a fleet at rest comes to generate again: members are started, brought up to date, and told to go on. If
    what was written has gone with the last member that had it, its trainer is told so, and sends it again."""
    world = _copy(world)
    for name, real in world.real.items():
        world.real[name] = real if real.alive else Real()
    for kind in (Kind.RESUME, Kind.WRITE, Kind.RESUME):
        _upkeep(world)
        if not world.fleet.holds and any(map(world.fleet.may_send, world.real)):
            return True
        _carried_out(world, kind)
    _upkeep(world)
    return not world.fleet.holds and any(map(world.fleet.may_send, world.real))


def _upkeep(world: World) -> None:
    for name, real in world.real.items():
        world.fleet.silent(name, "", 0, dead=not real.alive)
        world.fleet.answered(name, world.seen(name), 0)
        under_way = world.fleet.under_way
        if world.fleet.members[name].state is State.STALE and not under_way.wrote:
            world.real[name] = Real(True, int(world.fleet.version or 0), under_way.paused)
            world.fleet.admit(name, world.seen(name), 0)


def _carried_out(world: World, kind: Kind) -> None:
    """By all members that live, in place."""
    begun = _one(world, kind)
    while begun.plan is not None:
        begun = _answered(begun, min(begun.plan.to_ask()), Answer.OK, done=True)
    world.fleet, world.real = begun.fleet, begun.real


def walk(first: World, most: int) -> tuple[int, bool]:
    """Meets worlds in order of distance: how many, and whether these were all."""
    known, rested, waiting, met = {first.key()}, set(), deque([first]), 0
    while waiting and met < most:
        world = waiting.popleft()
        met += 1
        check(world)
        if world.plan is None and (rest := world.key()[:-1]) not in rested:
            rested.add(rest)
            assert can_resume(world), world.trail
        for after in steps(world):
            if (key := after.key()) not in known:
                known.add(key)
                waiting.append(after)
    return met, not waiting


def test_no_order_of_few_events_tears_a_fleet() -> None:
    walk(start(2, lives=1, publications=1), 1_500)


@pytest.mark.slow
def test_no_order_of_events_tears_a_fleet_of_two() -> None:
    met, all_of_them = walk(start(2, lives=1, publications=1), 100_000)
    assert all_of_them, met


@pytest.mark.slow
@pytest.mark.parametrize(("count", "min_ready"), [(2, 2), (3, 1)])
def test_nor_any_of_the_first_ones_a_larger_one(count: int, min_ready: int) -> None:
    walk(start(count, min_ready, lives=2, publications=2), 5_000)
