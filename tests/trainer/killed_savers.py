"""`python -m tests.trainer.killed_savers FOLDER COUNT SEED`: kills COUNT savers, and fails on a checkpoint in parts.

A fork costs no start of torch, so that each is killed within its first few saves, at a random moment.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tlt_server.trainer.checkpoint import Checkpoints

SIZE = 200_000


def save_for_ever(folder: Path) -> None:
    saves = Checkpoints(folder, keep=2)
    before = saves.newest()
    step = before.facts["step"] if before else 0
    while True:
        step += 1
        saves.save(step, {"a": torch.full((SIZE,), step), "b": torch.full((7,), -step)}, {"step": step})


def check(folder: Path, last: int) -> int:
    newest = Checkpoints(folder, keep=2).newest()
    if newest is None:
        assert last == 0
        return 0
    step = newest.facts["step"]
    assert step >= last, f"step {step} after {last}"
    assert newest.tensors["a"].eq(step).all()
    assert newest.tensors["b"].eq(-step).all()
    return step


def main(folder: Path, count: int, seed: int) -> None:
    moments, last = random.Random(seed), 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            save_for_ever(folder)
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"a saver failed before it was killed, after step {last}"
        last = check(folder, last)
    assert last > 0
    saves = Checkpoints(folder, keep=2)
    saves.save(last + 1, {"a": torch.zeros(SIZE)}, {"step": last + 1})
    saves.close()
    assert len(list(folder.iterdir())) == 2, "what a kill leaves is not cleared away"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
