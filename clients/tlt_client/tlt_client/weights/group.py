"""The process group in which weights are broadcast to one server's ranks, this process being rank 0."""

import atexit
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from tlt_client.errors import ConnectionLost, InvalidArgument

T = TypeVar("T")

SENT_S = 60.0
"""How long a broadcast may still take here when the server says that it has all of it."""
LOOK_EVERY = 1e-3
"""Seconds, at most. By gloo a broadcast waits for ranks that do not receive, whatever becomes of its group."""
LATE_S = 1.5
"""How much later than it is told torch's store gives up, which counts whole seconds. Its thread is waited for: one that
comes back while the interpreter ends has the whole process aborted ("terminate called without an active exception")."""


_IN_TORCH = threading.Lock()
"""Of a thread that nobody waits for, while it is within torch: if it came back from there while the interpreter ends,
the whole process would be aborted. Therefore the end takes the lock, and keeps it."""
atexit.register(_IN_TORCH.acquire)


class WeightsUpdateGroup:
    """What `init_weights_update_group` opens."""

    def __init__(self, group: Any, name: str, device: str) -> None:
        self.name = name
        self.device = device
        """Where what is broadcast lies."""
        self.lost = False
        """Whether a broadcast failed: then this group is to be destroyed, and another one opened."""
        self._group = group

    def require(self) -> None:
        """Raises InvalidArgument: it is lost."""
        if self.lost:
            raise InvalidArgument(f"group {self.name} is lost: destroy_weights_update_group, and open another one")

    def broadcast(self, data: torch.Tensor) -> "Future[None]":
        """To all other ranks, in a thread: with NCCL the first one waits for them even to begin."""

        def send() -> None:
            if self.device == "cpu":
                self._broadcast_by_gloo(data)
                return
            stream = torch.cuda.Stream(self.device)  # the trainer's own does not wait for the server
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                self._group.broadcast(data, 0).wait()
                stream.synchronize()

        return _started(send)

    def _broadcast_by_gloo(self, data: torch.Tensor) -> None:
        """The group is not let go before: torch waits then, with the GIL held."""
        began = time.monotonic()
        with _IN_TORCH:
            sending = self._group.broadcast(data, 0)
        while True:
            with _IN_TORCH:
                if sending.is_completed():
                    sending.wait()
                    return
            time.sleep(min(LOOK_EVERY, (time.monotonic() - began) / 10))  # a small tensor takes less

    def await_sent(self, sending: "Future[None]") -> None:
        """Raises ConnectionLost: it has failed."""
        try:
            sending.result(SENT_S)
        except (RuntimeError, NotDone) as error:
            raise ConnectionLost(f"a broadcast in group {self.name} failed: {_first_line(error)}") from error

    def lose(self) -> None:
        """Lets nothing wait for the server any longer."""
        self.lost = True
        if self.device != "cpu":
            self._group.abort()

    def close(self) -> None:
        torch.distributed.destroy_process_group(self._group)


class Opening:
    """A group that waits for the server's ranks, on a free port of `host`.

    world_size: of the group. Raises InvalidArgument: it cannot be opened here.
    """

    def __init__(self, host: str, world_size: int, backend: str, within_s: float) -> None:
        if backend not in ("nccl", "gloo"):
            raise InvalidArgument(f"backend={backend!r}: must be nccl or gloo")
        if backend == "nccl" and not torch.cuda.is_available():
            raise InvalidArgument("backend='nccl' needs a CUDA device here: a CPU sends by 'gloo'")
        try:
            listening = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
            )
        except OSError as error:
            raise InvalidArgument(f"master_address={host!r}: {error}; it is to be of this machine") from error
        name, device = f"tlt-{uuid.uuid4().hex}", "cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}"
        self.asked = {
            "master_address": host,
            "master_port": listening.getsockname()[1],
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        """Of the server."""

        def join() -> WeightsUpdateGroup:
            limit = timedelta(seconds=within_s)
            port, given = listening.getsockname()[1], listening.detach()  # torch's own would listen on all addresses
            store = TCPStore(host, port, world_size, is_master=True, timeout=limit, master_listen_fd=given)
            if self._abandoned:
                raise RuntimeError("the server refused")
            made = _process_group(store, world_size, backend, name, limit if backend == "gloo" else None)
            return WeightsUpdateGroup(made, name, device)

        self._abandoned = False
        self._joining, self._within_s = _started(join), within_s

    def abandon(self) -> None:
        """Nobody will join: ends the wait for them, by as many that do."""
        self._abandoned = True
        host, port, world_size = (self.asked[name] for name in ("master_address", "master_port", "world_size"))
        with contextlib.suppress(RuntimeError):  # some have come, and all places are taken
            for _ in range(world_size - 1):
                TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=LATE_S))
        with contextlib.suppress(RuntimeError, NotDone):
            self._joining.result(LATE_S)

    def group(self) -> WeightsUpdateGroup:
        """Once all ranks are there. Raises ConnectionLost: they are not in time."""
        try:
            return self._joining.result(self._within_s + LATE_S)
        except (RuntimeError, NotDone) as error:
            name = self.asked["group_name"]
            raise ConnectionLost(f"the server's ranks did not join group {name}: {_first_line(error)}") from error


def _process_group(store: Any, world_size: int, backend: str, name: str, timeout: timedelta | None) -> Any:
    """As SGLang makes its side. torch's public ways make the default group or a part of it, which is the trainer's."""
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        distributed_c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timeout or distributed_c10d.default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _started(function: Callable[[], T]) -> "Future[T]":
    """In a thread that nobody waits for at the end: what it waits for may never come."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - for who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="tlt-client-group", daemon=True).start()
    return future


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
