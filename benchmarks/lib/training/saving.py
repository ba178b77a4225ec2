"""How long training stands still for a checkpoint: as the trainer saves, and saving everything while it waits.

beside   what learns and its moments, copied; written beside training (`tlt_server.trainer.checkpoint`)
plain    everything, the frozen embedding and head too, by `torch.save`: left to the system to write
safe     everything, in the trainer's own way, waited for until it is on the disk, as it is after `beside`
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.lib.training.jobs import Job
from tlt_server.results import Figures
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.learn.loop import Trainer

ENOUGH_S = 12.0
"""Of one kind of save; past that it is not repeated any more."""


def checkpoint_figures(job: Job, trainer: Trainer, folder: Path, times: int) -> Figures:
    """Each kind of save, several times.

    Args:
        trainer: has made a step, so that its optimiser has moments to save.
        folder: on the disk to save to.
        times: of each kind, after a first one in which host memory is taken.
    """
    tensors, facts = trainer.state()
    everything = tensors | {"frozen.embedding": trainer.frozen.embedding, "frozen.head": trainer.frozen.head}
    beside, whole = Checkpoints(folder / "beside", keep=1), Checkpoints(folder / "whole", keep=1)

    def save_whole(step: int) -> None:
        whole.save(step, everything, facts)
        whole.wait()

    blocking = _seconds(job, lambda step: beside.save(step, tensors, facts), beside.wait, times)
    plain = _seconds(job, lambda _: torch.save((everything, facts), folder / "plain.pt"), lambda: None, times)
    safe = _seconds(job, save_whole, whole.wait, times)
    beside.close()
    whole.close()
    return {
        "checkpoint_mb": sum(tensor.nbytes for tensor in tensors.values()) / 1e6,
        "checkpoint_full_mb": sum(tensor.nbytes for tensor in everything.values()) / 1e6,
        "checkpoint_first_ms": 1000 * blocking[0],
        "checkpoint_blocking_ms": 1000 * median(blocking[1:]),
        "checkpoint_plain_ms": 1000 * median(plain[1:]),
        "checkpoint_safe_ms": 1000 * median(safe[1:]),
        "checkpoint_blocking_ratio": median(blocking[1:]) / median(plain[1:]),
    }


def _seconds(job: Job, save: Callable[[int], None], wait: Callable[[], None], times: int) -> list[float]:
    """Of each save, from an idle device to the moment when the next step could begin on it."""
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 2 or (len(took) <= times and time.perf_counter() - began < ENOUGH_S):
        wait()  # else a save would wait for the file of the one before
        job.wait()
        start = time.perf_counter()
        save(len(took))
        job.wait()
        took.append(time.perf_counter() - start)
    wait()
    return took
