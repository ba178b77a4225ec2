"""How soon a worker that trains is free for rollouts again: by `tlt_server.trainer.spot`, on this machine.

Load is reported at a random moment of a training step. The step under way ends, and what training holds on the device
is moved to host memory, as the trainer's process does.
"""

import random
import time
from collections.abc import Sequence
from statistics import median
from threading import Timer

import torch

from benchmarks.lib.command import SEED
from benchmarks.lib.training.jobs import Job
from tlt_server.results import Figures
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.memory import release
from tlt_server.trainer.learn.packing import Pack, Run, pack
from tlt_server.trainer.spot import Spot, Start, State, Yield

WORKER = "here"
WITHIN_S = 5.0


def yield_figures(job: Job, runs: Sequence[Run], times: int) -> Figures:
    """Over `times` yields; of each, the drafter trains anew before."""
    draw = random.Random(SEED)
    took = [_one(job, runs, draw.random()) for _ in range(times + 1)]
    del took[0]  # takes the host memory that later ones find
    held = torch.cuda.memory_reserved(job.device) / 1e9 if job.device.type == "cuda" else 0.0
    return {"yields": times, "yield_s_p50": median(took), "yield_s_max": max(took), "yield_held_gb": held}


def _one(job: Job, runs: Sequence[Run], moment: float) -> float:
    """Seconds from the load that a worker has to the moment when nothing trains on it.

    moment: of a step, as a share of it, when the load comes.
    """
    trainer, packs = job.trainer(), pack(runs, job.budget, job.device)
    spot = Spot((WORKER,), settle=0.0, silence=600.0, within=WITHIN_S)
    assert spot.report(WORKER, 0, time.perf_counter()) == [Start((WORKER,))]
    trainer.step(packs[:1])
    began = time.perf_counter()
    trainer.step(packs[:1])
    step_s = time.perf_counter() - began
    loaded: list[float] = []
    timer = Timer((1 + moment) * step_s, lambda: loaded.append(time.perf_counter()))
    timer.start()
    _train_until(trainer, packs, loaded, spot)
    trainer.move(torch.device("cpu"))
    del packs
    release(job.device)
    now = time.perf_counter()
    spot.yielded(WORKER, now)
    assert spot.state(WORKER) is State.BUSY
    return now - loaded[0]


def _train_until(trainer: Trainer, packs: Sequence[Pack], loaded: Sequence[float], spot: Spot) -> None:
    """Trains until the worker is told to yield; it is asked between two steps, as the trainer's process does."""
    actions: list[object] = []
    while not any(isinstance(action, Yield) for action in actions):
        trainer.step([packs[trainer.steps % len(packs)]])
        actions = [*(spot.report(WORKER, 1, loaded[0]) if loaded else spot.tick(time.perf_counter()))]
