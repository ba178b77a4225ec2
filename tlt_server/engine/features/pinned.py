"""States on their way off the GPU: picked and copied on a stream of their own, which nobody waits for.

They lie in one block of pinned memory, used in turn, so that no step pays for an allocation and none waits: where the
block is full, there is no room.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 256 << 20
BATCH_BYTES = 16 << 20
"""Of pinned memory; of one batch at most."""
ALIGNED = 64


class Rows(NamedTuple):
    """Consecutive tokens of one request, with where their states are to be found.

    group: a hash of the prompt's tokens. prompt: its tokens. start: position of the first. tokens: their ids.
    target_version, partial: as in `Stamp`. row: of the first one's state among the states of its step.
    """

    rid: str
    group: int
    prompt: int
    start: int
    tokens: Sequence[int]
    target_version: int
    partial: bool
    row: int


def tokens_of(rows: Iterable[Rows]) -> int:
    """How many."""
    return sum(len(each.tokens) for each in rows)


class States(NamedTuple):
    """Of a step, where it ran. hidden: [n, W], what a drafter reads; finals: [n, H], None where they are the same."""

    hidden: Tensor
    finals: Tensor | None

    @property
    def row_bytes(self) -> int:
        return sum(each[0].nbytes for each in self if each is not None)


@dataclass(frozen=True)
class PinnedBatch:
    """Rows, and their states in the block, one after the other; readable once it has arrived."""

    rows: Sequence[Rows]
    states: States
    arrived: Any
    end: int

    @property
    def tokens(self) -> int:
        return tokens_of(self.rows)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.states.row_bytes


class PinnedMemory:
    """The block of one scheduler process. One thread ships, another one frees, in the same order. device: where states
    come from; on a CPU the same is done without streams."""

    def __init__(self, device: torch.device, size: int = BLOCK_BYTES) -> None:
        self._on_gpu = device.type != "cpu"
        self._device, self._module = device, torch.get_device_module(device)
        self._side = self._module.Stream()
        # every page is touched now: a machine that is too small says so at start, and memory grows by nothing later
        self._block = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu).zero_()
        self._written = self._freed = 0  # bytes since the start

    def ship(self, rows: Sequence[Rows], states: States) -> PinnedBatch | None:
        """Sends rows off, of at most `BATCH_BYTES`; None where there is no room. The states are computed by now, as
        what tells the counts was copied behind them."""
        count = tokens_of(rows)
        places = [-(-count * each[0].nbytes // ALIGNED) * ALIGNED for each in states if each is not None]
        if (start := self._reserved(sum(places))) is None:
            return None
        index = torch.tensor([row for each in rows for row in range(each.row, each.row + len(each.tokens))])
        with self._module.stream(self._side):
            there = (index.pin_memory() if self._on_gpu else index).to(self._device, non_blocking=True)
            hidden = self._copied(states.hidden, there, start)
            finals = None if states.finals is None else self._copied(states.finals, there, start + places[0])
            arrived = self._module.Event()
            arrived.record()
        return PinnedBatch(rows, States(hidden, finals), arrived, self._written)

    def free(self, batch: PinnedBatch) -> None:
        """Its states have been read, and those of all before it."""
        self._freed = batch.end

    def _reserved(self, size: int) -> int | None:
        """Where so many bytes are free in one piece: behind the last ones, or at the block's beginning again."""
        total = len(self._block)
        begin = self._written % total
        skipped = total - begin if begin + size > total else 0
        if self._written + skipped + size - self._freed > total:
            return None
        self._written += skipped + size
        return 0 if skipped else begin

    def _copied(self, states: Tensor, index: Tensor, start: int) -> Tensor:
        picked = states.index_select(0, index)
        place = self._block[start : start + picked.nbytes].view(states.dtype).view(picked.shape)
        if self._on_gpu:
            states.record_stream(self._side)  # its memory is not given out again before this is done
        return place.copy_(picked, non_blocking=True)


def cut(rows: Sequence[Rows], most: int) -> list[list[Rows]]:
    """The same rows in lists of at most so many tokens."""
    if tokens_of(rows) <= most:  # a decode step's, nearly always
        return [list(rows)] if rows else []
    lists: list[list[Rows]] = [[]]
    room = most
    for each in rows:
        done = 0
        while done < len(each.tokens):
            if not room:
                lists.append([])
                room = most
            part = each.tokens[done : done + room]
            lists[-1].append(each._replace(start=each.start + done, tokens=part, row=each.row + done))
            done, room = done + len(part), room - len(part)
    return lists
