"""A real server with something to see: load that swells and ebbs, publications, drafters, one of no use."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlt_client import Client, SamplingParams

from tests.server.trainer import Trainer, shuffled
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems

TARGET, DRAFTER = default_paths()
LOADS = (16, 12, 8, 5, 3, 2, 1)
"""Requests in flight, as a step's rollouts drain."""
FLAGS = [word for arm in ("1,1,2", "3,1,4", "5,4,16") for word in ("--arm", arm)]


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Rollouts in waves, while the block runs."""
    over = threading.Event()
    prompts = [problem.prompt for problem in problems(16, seed=11)]

    def step() -> None:
        with Client(url) as client:
            while not over.is_set():
                for load in LOADS:
                    sampling = SamplingParams(max_new_tokens=120, ignore_eos=True)
                    client.generate_batch(prompts[:load], sampling)
                    if over.is_set():
                        break

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def train(url: str, folder: Path, publications: int, every_s: float) -> None:
    """What a trainer does: publishes targets under names, and drafters, of which one is refused and one of no use."""
    trainer = Trainer(url)
    for step in range(1, publications + 1):
        time.sleep(every_s)
        trainer.disk(TARGET, weight_version=f"step-{step}").raise_for_status()
        time.sleep(every_s / 2)
        if step == 2:
            trainer.drafter(Path("drafters/step-1"))
        trainer.drafter(DRAFTER, trained_on=step).raise_for_status()
    trainer.drafter(shuffled(DRAFTER, folder / "useless", 3)).raise_for_status()
    time.sleep(2 * every_s)
    trainer.close()
