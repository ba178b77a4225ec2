"""Agreement of the ranks of one model: they write the same weights at the same step, or none of them does."""

from typing import Any

import torch
import torch.distributed as dist


def objections(group: Any, mine: str | None) -> list[str]:
    """What the ranks object to the step that all of them are about to take; empty where they agree. A collective.

    Args:
        group: a process group on the CPU, of all ranks that hold a part of the model.
        mine: this rank's objection, or None.
    """
    if lowest(group, int(mine is None)):
        return []
    all_of_them: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    return sorted({each for each in all_of_them if each is not None})


def lowest(group: Any, mine: int) -> int:
    """The lowest of the numbers that the ranks give. A collective."""
    number = torch.tensor(mine)
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return int(number)
