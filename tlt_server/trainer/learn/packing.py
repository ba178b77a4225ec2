"""Sequences side by side in one row of a fixed number of tokens, so that nothing is computed for padding.

A drafter reads the target's states of one token together with the token after it, and says what comes after that. Such
a pair is an *entry*; a run of T tokens has T - 1. A pack is entries of several runs, one run after another; what
belongs to one run never reaches another, because attention, the steps of a chain and the loss all go by `last`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.trainer.learn.attention import Base, by_sequence, by_sequence_one_step, flex


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence, and the target's states of them.

    tokens: [T] int64. states: [T, W], what the drafter reads. finals: [T, H], the target's final hidden states, after
    its norm; for EAGLE these are the states. first: position of tokens[0]. prompt: so many tokens of the sequence are
    read alone: they are its prompt, which nobody drafts, or what lies before a window of a long one. request: whose.
    """

    tokens: Tensor
    states: Tensor
    finals: Tensor
    first: int = 0
    prompt: int = 0
    request: str = ""

    @property
    def entries(self) -> int:
        return len(self.tokens) - 1

    @property
    def learnt(self) -> int:
        """Entries that a chain begins at."""
        return max(0, self.entries - max(0, self.prompt - 1 - self.first))

    def to(self, device: torch.device) -> "Run":
        tokens, states, finals = (each.to(device) for each in (self.tokens, self.states, self.finals))
        return replace(self, tokens=tokens, states=states, finals=finals)


@dataclass(frozen=True)
class Pack:
    """N entries of several runs.

    states: [N, W], of the token before. tokens: [N] int64, the token. finals: [N, H], the target's final hidden state
    of the token, whose law is that of the token after. positions: [N] int64, of the token before; a drafter's own count
    of positions is one behind. last: [N] int64, index of the last entry of the same run. counted: [N] bool, whether a
    chain that begins here is one that a server would draft. bounds: of each run, as in `by_sequence`. requests: whose
    runs they are; of a filler at the end, nobody's.
    """

    states: Tensor
    tokens: Tensor
    finals: Tensor
    positions: Tensor
    last: Tensor
    counted: Tensor
    bounds: tuple[tuple[int, int], ...]
    requests: tuple[str, ...] = ()

    def ahead(self, steps: int) -> tuple[Tensor, Tensor]:
        """The entry `steps` after each, [N] int64, and where the run goes on so far and the chain counts, [N] bool."""
        index = torch.arange(len(self.tokens), device=self.tokens.device) + steps
        return index.minimum(self.last), (index <= self.last) & self.counted

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those fields that are tensors, in order."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}

    def to(self, device: torch.device) -> "Pack":
        return replace(self, **{name: each.to(device) for name, each in self.tensors.items()})

    def attention(self, steps: int) -> Base:
        """Causal within each run, for chains of so many steps: the kernel for the device that the pack is on."""
        if self.tokens.is_cuda:
            return flex(self.last)
        return by_sequence_one_step(self.bounds) if steps == 1 else by_sequence(self.bounds)


def plan(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Which of `sizes` to put together, by index: first-fit decreasing (Johnson, 1973), at most `budget` a pack. Raises
    ValueError: a size is above the budget; `split` cuts a run."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        if size > budget:
            raise ValueError(f"{size} entries do not fit into a pack of {budget}")
        chosen = next((pack for pack, free in enumerate(room) if free >= size), len(packs))
        if chosen == len(packs):
            packs.append([])
            room.append(budget)
        packs[chosen].append(index)
        room[chosen] -= size
    return packs


def split(run: Run, budget: int) -> list[Run]:
    """`run` in parts of at most `budget` entries, each entry once. A part does not see the parts before it."""
    parts = []
    for first in range(0, run.entries, budget):
        kept = slice(first, first + budget + 1)
        tensors = run.tokens[kept], run.states[kept], run.finals[kept]
        parts.append(Run(*tensors, run.first + first, run.prompt, run.request))
    return parts


def within(runs: Iterable[Run], budget: int) -> list[Run]:
    """The first `budget` entries of `runs`, the last run cut."""
    kept: list[Run] = []
    for run in runs:
        kept.append(split(run, budget)[0])
        budget -= kept[-1].entries
        if budget <= 0:
            break
    return kept


def pack(runs: Iterable[Run], budget: int, device: torch.device) -> list[Pack]:
    """All entries of `runs` in packs of at most `budget`.

    On a GPU each is filled up to the budget with an empty run, because a kernel is compiled for every length. It is put
    together there, too: states are large, and a host would copy them twice.
    """
    parts = [part for run in runs for part in split(run.to(device), budget)]
    fill = budget if device.type == "cuda" else 0
    return [
        join([parts[index] for index in chosen], fill).to(device) for chosen in plan([r.entries for r in parts], budget)
    ]


def join(runs: Sequence[Run], fill: int = 0) -> Pack:
    """One pack of all `runs`, in order; up to `fill` entries it is filled with zeros that count for nothing."""
    ends = list(accumulate(run.entries for run in runs))
    rest = max(fill - ends[-1], 0)
    positions = [run.first + torch.arange(run.entries) for run in runs]
    counted = [at + 1 >= run.prompt for run, at in zip(runs, positions, strict=True)]
    if rest:
        ends.append(fill)
    bounds = tuple(zip([0, *ends], ends, strict=False))
    return Pack(
        states=F.pad(torch.cat([run.states[:-1] for run in runs]), (0, 0, 0, rest)),
        tokens=F.pad(torch.cat([run.tokens[1:] for run in runs]).long(), (0, rest)),
        finals=F.pad(torch.cat([run.finals[1:] for run in runs]), (0, 0, 0, rest)),
        positions=F.pad(torch.cat(positions), (0, rest)),
        last=torch.cat([torch.full((stop - first,), stop - 1) for first, stop in bounds]),
        counted=F.pad(torch.cat(counted), (0, rest)),
        bounds=bounds,
        requests=tuple(run.request for run in runs),
    )
