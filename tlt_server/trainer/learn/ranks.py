"""This process's place among those that `torchrun` started: its rank, its device, its lines to the others."""

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.team import Line
from tlt_server.wire.devices import identity

NO_ORDERS = timedelta(days=365)
"""As long may there be nothing to learn. That a rank is gone is noticed by its connection, at once."""


class Place(NamedTuple):
    """rank: 0 leads. device: this rank's. devices: identities of all ranks'. lines: the leader's to each helper, a
    helper's to the leader, by rank."""

    rank: int
    device: torch.device
    devices: tuple[str, ...]
    lines: Mapping[int, Line]


@contextlib.contextmanager
def joined(name: str | None) -> Iterator[Place]:
    """Waits for all ranks; alone where torchrun did not start this process. name: torch's, of the device; None: a GPU
    if there is one. Raises ConfigError: it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_torchelastic_launched():
        device = _device(name)
        yield Place(0, device, (identity(device),), {})
        return
    if name not in {"cpu", "cuda"}:
        raise ConfigError(f"device {name}: under torchrun each process has its own. Say cuda or cpu, or leave it out")
    device = _device(name if name == "cpu" else f"cuda:{dist.get_node_local_rank()}")  # in their order
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, orders = dist.get_rank(), dist.new_group(backend="gloo", timeout=NO_ORDERS)
    others = range(1, dist.get_world_size()) if rank == 0 else (0,)
    lines = {other: Line(other, device, orders) for other in others}
    devices: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(devices, identity(device), group=orders)
    yield Place(rank, device, tuple(devices), lines)
    dist.destroy_process_group()  # not after an error: it would wait for a rank that is gone


def _device(name: str) -> torch.device:
    """Current from now on: streams and events are the current device's where none is named."""
    try:
        device = torch.empty(0, device=name).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name}: {str(error).splitlines()[0]}") from error
