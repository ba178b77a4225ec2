"""The group in which a trainer broadcasts weights: joined within a time, and never led by the server.

Upstream waits for half an hour for a trainer that never comes, and serves nothing meanwhile; as rank 0 it would listen
on all addresses for whoever comes. A group of the same name takes the place of the one before, whose trainer may be
gone.
"""

from datetime import timedelta
from typing import Any

import torch
from sglang.srt.utils import init_custom_process_group

from tlt_server.errors import UpdateRefused

JOIN = timedelta(seconds=60)
"""For the trainer's store, and with gloo for each message of the group; NCCL has a limit of its own."""


def join(updater: Any, recv_req: Any) -> None:
    """Joins the group that a trainer opens, of upstream's `WeightUpdater`, which keeps the groups by their names.
    Raises UpdateRefused: the trainer is not there in time, or what it asks for cannot be."""
    asked, groups = recv_req, updater._model_update_group
    rank, place = asked.rank_offset + updater.tp_rank, f"{asked.master_address}:{asked.master_port}"
    if asked.rank_offset < 1 or rank >= asked.world_size:  # the first is asked of all ranks alike: none is left waiting
        raise UpdateRefused(
            f"rank {rank} of {asked.world_size}: the trainer is rank 0, and the server's ranks follow it"
        )
    if not asked.group_name:
        raise UpdateRefused("a group needs a name: give it a group_name")
    if (old := groups.pop(asked.group_name, None)) is not None:  # its trainer has begun anew
        torch.distributed.destroy_process_group(old)
    try:
        store = torch.distributed.TCPStore(
            asked.master_address.strip("[]"), asked.master_port, asked.world_size, is_master=False, timeout=JOIN
        )
        groups[asked.group_name] = init_custom_process_group(
            backend=asked.backend,
            store=torch.distributed.PrefixStore(asked.group_name, store),
            world_size=asked.world_size,
            rank=rank,
            group_name=asked.group_name,
            timeout=JOIN if asked.backend == "gloo" else None,
        )
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UpdateRefused(f"no group with a trainer at {place} within {JOIN.seconds} s: {reason}") from error
