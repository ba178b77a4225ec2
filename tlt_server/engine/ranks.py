"""Agreement of the ranks of one model: they write the same weights at the same step, or none of them does.

A group is one of processes on the CPU, of all ranks that hold a part of the model; None where there is one rank alone.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def objections(group: Any, mine: str | None) -> list[str]:
    """What the ranks object to the step that all of them are about to take; empty where they agree. A collective.
    mine: this rank's objection, or None."""
    if group is None:
        return [] if mine is None else [mine]
    if lowest(group, mine is None):
        return []
    return gathered(group, mine)


def gathered(group: Any, mine: str | None) -> list[str]:
    """What the ranks say, each text once, in order. A collective."""
    all_of_them: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    return sorted({each for each in all_of_them if each is not None})


def lowest(group: Any, mine: int) -> int:
    """The lowest of the numbers that the ranks give. A collective."""
    if group is None:
        return mine
    number = torch.tensor(int(mine))
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return int(number)


def twin(group: Any, timeout_s: float) -> Any:
    """Another group of the same ranks, for another thread: the collectives of one group have one order. A collective.
    timeout_s: after which what waits for another rank raises RuntimeError."""
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True)


def joined(group: Any, part: torch.Tensor) -> torch.Tensor | None:
    """The ranks' rows, one rank's after the other's, on the first rank; None on the others. A collective.
    part: [n, ...] on the CPU, contiguous, of one shape and dtype on all ranks."""
    if group is None:
        return part
    parts, whole = None, None
    if dist.get_rank(group) == 0:
        whole = part.new_empty((dist.get_world_size(group) * len(part), *part.shape[1:]))
        parts = [each.view(torch.uint8) for each in whole.chunk(dist.get_world_size(group))]
    dist.gather(part.view(torch.uint8), parts, group=group, group_dst=0)  # gloo knows no bfloat16
    return whole


def of_first(group: Any, mine: Any) -> Any:
    """What the first rank gives, on all. A collective."""
    given = [mine]
    dist.broadcast_object_list(given, src=dist.get_global_rank(group, 0), group=group)
    return given[0]
