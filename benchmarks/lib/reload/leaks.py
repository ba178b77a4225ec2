"""What a server holds: memory, file handles, shared memory. Whatever grows from swap to swap is a leak."""

import os
import shutil
from typing import NamedTuple

import psutil
import torch

from tlt_server.results import Figures


class Held(NamedTuple):
    """gpu_mb: on the first GPU, by all processes. shm_mb: in /dev/shm, by all processes. The rest is the server's."""

    gpu_mb: float
    rss_mb: float
    shm_mb: float
    file_handles: int


def held(group: int) -> Held:
    """What the processes of a group hold now."""
    members = [each for each in psutil.process_iter() if _group_of(each.pid) == group]
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return Held(
        gpu_mb=(total - free) / 1e6,
        rss_mb=sum(each.memory_info().rss for each in members) / 1e6,
        shm_mb=shutil.disk_usage("/dev/shm").used / 1e6,
        file_handles=sum(each.num_fds() for each in members),
    )


def leak_figures(before: Held, after: Held) -> Figures:
    """By how much each grew."""
    figures: Figures = {f"leaked_{name}": getattr(after, name) - getattr(before, name) for name in Held._fields}
    return {"memory_leaked_mb": sum(figures[f"leaked_{name}_mb"] for name in ("gpu", "rss", "shm"))} | figures


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:  # it ended meanwhile
        return None
