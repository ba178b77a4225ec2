"""`python -m tests.trainer.killed_trainers FOLDER COUNT SEED`: kills a trainer COUNT times; nothing may be lost."""

import logging
import random
import sys
import time
from pathlib import Path

from tests.trainer.stand_in import Running, Server, until
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.published import Published

LONGEST_LIFE_S = 6.0
"""A start takes half of that."""


def kill(folder: Path, count: int, seed: int) -> None:
    """Kills it at random moments of its start, its training, its saves; then lets it live."""
    moments, trainer = random.Random(seed), Running(folder / "trainer", "passes = 1000.0")
    saved = 0
    with Server(folder / "one", trainer.control, trainer.features) as server:
        for turn in range(count):
            with trainer.process() as process:
                end = time.monotonic() + moments.uniform(LONGEST_LIFE_S / 4, LONGEST_LIFE_S)
                while time.monotonic() < end:
                    server.push(moments.sample(range(40 * turn, 40 * turn + 40), 10))
                    assert process.poll() is None, trainer.log
                    time.sleep(0.3)
            saved = _check(trainer, server, saved)
            logging.info("turn %d: step %d, drafter %d", turn, saved, server.newest)
        with trainer.process() as process:
            until(lambda: trainer.status().get("steps", -1) >= saved, trainer.log)
            until(lambda: server.name in trainer.status()["servers"], trainer.log)
            server.push(range(40))
            until(lambda: server.arrived and trainer.status()["steps"] > saved, trainer.log)
            trainer.end(process)
        _check(trainer, server, saved)


def _check(trainer: Running, server: Server, saved: int) -> int:
    """The newest checkpoint's step, once it is sure that nothing was lost."""
    newest = Checkpoints(trainer.folder / "checkpoints").newest()
    steps = newest.facts["steps"] if newest else 0
    assert steps >= saved
    versions = [each.version for each in server.arrived]
    assert versions == sorted(set(versions)), versions
    published = Published(trainer.folder).newest()
    assert (published.version if published else 0) >= server.newest
    assert not {"Traceback", "refuses"} & set(trainer.log.split()), trainer.log
    return int(steps)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    kill(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
