"""The trainer's processes, its workers, and which of them may train now, by what servers report on the control link."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import msgspec
import torch
from msgspec.structs import replace

from tlt_server.errors import ConfigError
from tlt_server.trainer.config import SpotSettings
from tlt_server.trainer.learn.memory import settle
from tlt_server.trainer.servers import SERVERS_KEPT
from tlt_server.trainer.spot import Action, Overdue, Pace, Spot, State, Yield
from tlt_server.wire.messages import Hello


class WorkerStatus(msgspec.Struct):
    """A worker at a moment.

    device: by `wire.devices.identity`. state: busy, idle or training, as in spot.py; training means that it may.
    seconds: in each state until now. yields: how often it was asked for its device. slowest_yield_s: of those.
    """

    device: str
    state: str
    seconds: dict[str, float]
    yields: int = 0
    slowest_yield_s: float = 0.0


class Workers:
    """Which ranks may train; the control link's thread tells it what it hears, the training thread asks.

    devices: of each rank. overdue: called in the control link's thread with a rank that has not given its device back
    in time. Raises ConfigError: more are to be free than there are.
    """

    def __init__(
        self,
        devices: Sequence[str],
        settings: SpotSettings,
        overdue: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices, self._settings, self._overdue, self._clock = tuple(devices), settings, overdue, clock
        if settings.on and settings.at_least > len(devices):
            raise ConfigError(
                f"spot: at_least {settings.at_least} of {len(devices)} processes. Lower it, or start more"
            )
        names = tuple(map(str, range(len(devices))))
        self._spot = Spot(names, settings.settle_s, settings.silence_s, settings.within_s, settings.at_least)
        self._pace = Pace(settings.slowdown) if settings.on and settings.slowdown else None
        self._loaded = -math.inf  # when a server on our devices was last seen to have load
        self._servers: dict[str, tuple[str, ...]] = {}
        self._loads: dict[str, tuple[float, Hello]] = {}
        self._asked: dict[int, float] = {}
        nothing = dict.fromkeys((state.value for state in State), 0.0)
        self._workers = [WorkerStatus(device, "", dict(nothing)) for device in devices]
        self._counted = clock()
        self._lock = Lock()

    # -- the control link's thread --

    def hear(self, peer: str, hello: Hello) -> None:
        """peer: `NAME/TOKEN`, as `Sender` names it."""
        name = peer.rpartition("/")[0]
        with self._lock:
            self._meet(name, hello.devices)
            if self._settings.on and hello.load is not None:
                self._report(name, hello)

    def _meet(self, server: str, devices: tuple[str, ...]) -> None:
        """What was a rank's own until now, it may hold memory of."""
        now = self._count()
        for rank, device in enumerate(self._devices):
            if self._settings.on and device in devices and self._is_own(rank):
                self._asked.setdefault(rank, now)
        self._servers.pop(server, None)
        self._servers[server] = devices  # the last one heard is the last one here
        if len(self._servers) > SERVERS_KEPT:
            del self._servers[gone := next(iter(self._servers))]
            self._loads.pop(gone, None)
            if self._pace:
                self._pace.forget(gone)

    def _report(self, server: str, hello: Hello) -> None:
        """A device's load is that of all its servers that are not silent; where training goes on beside them, it has
        to leave those alone whose memory is released."""
        now, devices = self._count(), self._servers.get(server, ())
        if not devices:
            return
        self._loads[server] = now, hello
        for rank, device in enumerate(self._devices):
            if device in devices:
                heard = self._heard(device, now)
                load = sum(each.lent + (0 if self._pace else each.load or 0) for each in heard)
                self._act(self._spot.report(str(rank), load, now))
        if self._pace and set(devices) & set(self._devices):
            self._pace.heard(server, hello.decoded_s, hello.usual_s, now)

    def _heard(self, device: str, now: float) -> list[Hello]:
        """Of the device's servers that are not silent, what each said last."""
        there = [name for name, used in self._servers.items() if device in used and name in self._loads]
        return [hello for at, hello in map(self._loads.__getitem__, there) if now - at <= self._settings.silence_s]

    def _is_loaded(self, now: float) -> bool:
        """Whether a server on our devices has not drained."""
        if any(hello.load for device in set(self._devices) for hello in self._heard(device, now)):
            self._loaded = now
        return now - self._loaded <= self._settings.settle_s

    def tick(self) -> None:
        """A few times a second, whether anything is heard or not."""
        with self._lock:
            self._act(self._spot.tick(self._count()))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Yield(worker):
                    self._asked.setdefault(int(worker), self._clock())
                case Overdue(worker):
                    self._overdue(int(worker))

    # -- the training thread --

    def training(self) -> tuple[int, ...]:
        """Ranks that may train in the next step: not one that is asked for its device, though it still has it; and none
        while training rests beside servers on our devices that have not drained."""
        with self._lock:
            if self._pace and self._is_loaded(now := self._clock()) and self._pace.rests(now):
                return ()
            ranks = (rank for rank in range(len(self._devices)) if self._state(rank) is State.TRAINING)
            return tuple(rank for rank in ranks if rank not in self._asked)

    @contextmanager
    def computing(self, device: torch.device, entries: int = 0) -> Iterator[None]:
        """Meanwhile the device, and those of other ranks, compute a step of so many entries, or a judgement."""
        if self._pace is None:
            yield
            return
        with self._lock:
            beside = self._is_loaded(now := self._clock())
            self._pace.began(now, entries)
        yield
        settle(device)
        with self._lock:
            loaded = self._is_loaded(now := self._clock())
            self._pace.ended(now, beside or loaded)

    def asked(self) -> tuple[int, ...]:
        """Ranks that are to give their devices back; `yielded` says that one has."""
        with self._lock:
            return tuple(self._asked)

    def yielded(self, rank: int) -> None:
        """The rank holds nothing on its device any more."""
        with self._lock:
            now = self._count()
            worker = self._workers[rank]
            worker.yields += 1
            worker.slowest_yield_s = max(worker.slowest_yield_s, now - self._asked.pop(rank))
            self._act(self._spot.yielded(str(rank), now))

    # -- any thread --

    @property
    def paced(self) -> tuple[str, ...]:
        """Devices on which training goes by the step times of servers there."""
        return self._devices if self._pace else ()

    @property
    def slowdown(self) -> float:
        """By which decode steps take longer for training beside them, as a share, by the servers' own times."""
        with self._lock:
            return self._pace.slowdown if self._pace else 0.0

    def status(self) -> list[WorkerStatus]:
        """Of each rank."""
        with self._lock:
            self._count()
            return [
                replace(worker, state=self._state(rank).value, seconds=dict(worker.seconds))
                for rank, worker in enumerate(self._workers)
            ]

    def _state(self, rank: int) -> State:
        return self._spot.state(str(rank)) if self._settings.on and not self._is_own(rank) else State.TRAINING

    def _is_own(self, rank: int) -> bool:
        """Whether no server is known to be on the rank's device."""
        return not any(self._devices[rank] in used for used in self._servers.values())

    def _count(self) -> float:
        """Adds up the time since the last call to the states of then; gives the time now."""
        before, self._counted = self._counted, self._clock()
        for rank, worker in enumerate(self._workers):
            worker.seconds[self._state(rank).value] += self._counted - before
        return self._counted
