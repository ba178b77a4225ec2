"""`python -m tests.trainer.killed_trainers FOLDER COUNT SEED`: kills a trainer COUNT times; nothing may be lost."""

import logging
import random
import sys
import time
from pathlib import Path

from tests.trainer.stand_in import Running, Server, until
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.published import Published

START_S, TRAINING_S = 5.0, 1.5
"""A start takes about half of the first; a checkpoint or a judgement comes several times in the second."""


def kill(folder: Path, count: int, seed: int) -> None:
    """Kills it at random moments of its start and, in turn, of its training and its saves; then lets it live."""
    moments, trainer = random.Random(seed), Running(folder / "trainer", "passes = 1000.0")
    saved = 0
    with Server(folder / "one", trainer.control, trainer.features) as server:
        for turn in range(count):
            with trainer.process():
                if turn % 2 == 0:
                    _train_beyond(trainer, server, saved)
                time.sleep(moments.uniform(0, START_S if turn % 2 else TRAINING_S))
            saved = _check(trainer, server, saved)
            logging.info("turn %d: step %d, drafter %d", turn, saved, server.newest)
        with trainer.process() as process:
            _train_beyond(trainer, server, saved)
            until(lambda: server.arrived, "nothing was published")
            trainer.end(process)
        assert _check(trainer, server, saved) > saved


def _train_beyond(trainer: Running, server: Server, saved: int) -> None:
    """Until it has learnt more than the last checkpoint holds."""

    def done() -> bool:
        steps = trainer.status().get("steps")
        assert steps is None or steps >= saved, f"step {steps} after {saved}"
        server.push(range(40))  # of fewer prompts none might be held out, to judge by
        return steps is not None and steps > saved

    until(done, "it does not train")


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
    logging.getLogger("httpx").setLevel(logging.WARNING)
    kill(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
