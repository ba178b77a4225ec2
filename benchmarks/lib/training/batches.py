"""Rollouts of many lengths as batches of one size: packed, as the trainer does it, or padded.

    packed   runs side by side, `tlt_server.trainer.learn.packing`
    padded   in the order in which they come, each as long as the longest of its batch; padding costs what tokens cost
    masked   the same, yet the loss leaves padding out: no logits are computed for it
    sorted   padded, runs of about the same length together

All are the trainer's `Pack`, so that the same network, loss and optimiser train on them: a padded run is one that goes
on with zeros. Attention within padded batches is torch's own for batches of one length, which needs no compiling. Only
`packed` and `masked` may be learnt from; in the other two padding counts as tokens do, which is what it costs where the
loss is computed everywhere and masked afterwards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.trainer.learn.attention import Base
from tlt_server.trainer.learn.packing import Pack, Run, join, pack, split

Batching = Callable[[Sequence[Run], int, torch.device], list[Pack]]
"""Runs, entries of a batch at most, device -> batches that hold each entry of the runs once."""


class Padded(Pack):
    """Runs of one length: `bounds` are those of rows of a batch."""

    def attention(self, steps: int) -> Base:
        """Without the denominators, which only the later steps of a chain need."""
        assert steps == 1
        length = self.bounds[0][1]

        def base(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            rows = [x.unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value)]
            mixed = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            return mixed.transpose(0, 1).flatten(1, 2), query.new_empty(0)

        return base


def padded(runs: Sequence[Run], budget: int, device: torch.device) -> list[Pack]:
    """Runs longer than the budget are split."""
    return [batch.to(device) for _, batch in _padded(runs, budget)]


def masked(runs: Sequence[Run], budget: int, device: torch.device) -> list[Pack]:
    """As `padded`, with only the entries of runs counted."""
    batches = []
    for together, batch in _padded(runs, budget):
        length = batch.bounds[0][1]
        real = torch.cat([torch.arange(length) < run.entries for run in together])
        batches.append(replace(batch, counted=batch.counted & real).to(device))
    return batches


def by_length(runs: Sequence[Run], budget: int, device: torch.device) -> list[Pack]:
    """As `padded`, the runs sorted by length before."""
    return padded(sorted(runs, key=lambda run: run.entries), budget, device)


WAYS: Mapping[str, Batching] = {"packed": pack, "padded": padded, "masked": masked, "sorted": by_length}


def _padded(runs: Sequence[Run], budget: int) -> Iterator[tuple[list[Run], Pack]]:
    for together in _groups([part for run in runs for part in split(run, budget)], budget):
        length = max(run.entries for run in together)
        joined = join([_prolonged(run, length) for run in together])
        yield together, Padded(**vars(joined))


def _groups(runs: Sequence[Run], budget: int) -> Iterator[list[Run]]:
    """As many of the next runs as fit, padding included."""
    group: list[Run] = []
    for run in runs:
        if group and max(each.entries for each in (*group, run)) * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(run)
    yield group


def _prolonged(run: Run, entries: int) -> Run:
    more = entries - run.entries
    states, finals = (F.pad(x, (0, 0, 0, more)) for x in (run.states, run.finals))
    return replace(run, tokens=F.pad(run.tokens, (0, more)), states=states, finals=finals)
