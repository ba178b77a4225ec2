"""A training step spread over processes, one a GPU: rank 0 leads, the others help (helper.py). `torchrun` starts them.

    rank 0 ── order, weights, packs ──▶ helper ── gradients, loss ──▶ rank 0: their sum, clipped, one step of AdamW

A helper keeps nothing that a later step needs: it may be left out of any step, as spot training has it, and checkpoints
do not depend on the number of processes. All bytes go by way of one GPU: right for the few GPUs of a machine. FSDP2
would tie every step to every rank, to shard weights of one layer.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_server.errors import RankLost
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack

META = torch.device("meta")


@dataclass(frozen=True)
class Join:
    """Leader -> helper, first of all. config: of the drafter."""

    config: dict[str, Any]


@dataclass(frozen=True)
class Learn:
    """Leader -> helper, followed by the weights, by embedding and head where they are others, and by the packs.

    The helper answers with the loss of its packs, and the gradients. chains: of the whole step. frozen: of the target;
    None where the helper has it. Tensors are on `META`: of the shapes and dtypes that follow.
    """

    chains: int
    frozen: Frozen | None
    packs: tuple[Pack, ...]


@dataclass(frozen=True)
class Free:
    """Leader -> helper: the GPU is needed; hold nothing there. The helper answers when it does not."""


@dataclass(frozen=True)
class End:
    """Leader -> helper: training is over."""


Order = Join | Learn | Free | End


class Line:
    """To another rank; what one side sends, the other receives, in the same order. All methods raise RankLost. device:
    whose tensors are sent. orders: a process group on the CPU, silent while there is nothing to learn."""

    def __init__(self, rank: int, device: torch.device, orders: Any) -> None:
        self._rank, self.device, self._orders = rank, device, orders

    def tell(self, order: Order) -> None:
        with self._alive():
            dist.send_object_list([order], self._rank, self._orders)

    def hear(self) -> Order:
        """Waits for an order."""
        orders: list[Any] = [None]
        with self._alive():
            dist.recv_object_list(orders, self._rank, self._orders)
        order: Order = orders[0]
        return order

    def send(self, tensors: Iterable[Tensor]) -> None:
        with self._alive():
            for tensor in tensors:
                dist.send(_raw(tensor.contiguous()), self._rank)

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Into these, which are contiguous."""
        with self._alive():
            for tensor in tensors:
                dist.recv(_raw(tensor), self._rank)

    def receive_like(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """New ones on `device`, of the shapes and dtypes of these."""
        received = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in tensors]
        self.receive(received)
        return received

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise RankLost(f"rank {self._rank} of the trainer is gone: see its own output ({reason})") from error


class Team:
    """The leader's side; without helpers, a step is its own. Methods raise RankLost but for `end`. lines: to each
    helper, by its rank. config: of the drafter. present: ranks that take part in the next step."""

    def __init__(self, lines: Mapping[int, Line] | None = None, config: Mapping[str, Any] | None = None) -> None:
        self._lines = dict(lines or {})
        self.present: Sequence[int] = (0, *self._lines)
        self._versions: dict[int, int] = {}
        self._helping: list[Line] = []
        for line in self._lines.values():
            line.tell(Join(dict(config or {})))

    def share(self, packs: Sequence[Pack], chains: int, network: Network, frozen: Frozen) -> Sequence[Pack]:
        """Sends the packs of others to them; gives those of this rank. chains: of all packs."""
        helpers = [rank for rank in self.present if rank in self._lines]
        mine, *others = spread(packs, 1 + len(helpers))
        self._helping = []
        for rank, share in zip(helpers, others, strict=True):
            if share:
                self._send(rank, share, chains, network, frozen)
        return mine

    def _send(self, rank: int, packs: Sequence[Pack], chains: int, network: Network, frozen: Frozen) -> None:
        line, missing = self._lines[rank], self._versions.get(rank) != frozen.version
        line.tell(Learn(chains, frozen.to(META) if missing else None, tuple(pack.to(META) for pack in packs)))
        line.send(network.state_dict().values())
        if missing:
            line.send((frozen.embedding, frozen.head))
            self._versions[rank] = frozen.version
        for pack in packs:
            line.send(pack.tensors.values())
        self._helping.append(line)

    def gather(self, network: Network) -> Tensor:
        """Adds the others' gradients; gives the sum of their losses."""
        total = torch.zeros((), device=next(network.parameters()).device)
        for line in self._helping:
            total += line.receive_like((total,))[0]
            for weight in network.parameters():
                (part,) = line.receive_like((weight,))
                weight.grad = part if weight.grad is None else weight.grad.add_(part)
        return total

    def free(self, rank: int) -> None:
        """Returns when a helper holds nothing on its GPU."""
        self._versions.pop(rank, None)
        self._lines[rank].tell(Free())
        self._lines[rank].hear()

    def end(self) -> None:
        """Lets the helpers end; one that is gone has."""
        for line in self._lines.values():
            with contextlib.suppress(RankLost):
                line.tell(End())


def spread(packs: Sequence[Pack], parts: int) -> list[list[Pack]]:
    """Longest first, each to the part that has the least; the first part is the largest."""
    shares: list[list[Pack]] = [[] for _ in range(parts)]
    rows = [0] * parts
    for pack in sorted(packs, key=lambda pack: -len(pack.tokens)):
        part = rows.index(min(rows))
        shares[part].append(pack)
        rows[part] += len(pack.tokens)
    return shares


def _raw(tensor: Tensor) -> Tensor:
    """The same memory as bytes: NCCL and gloo each lack some dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
