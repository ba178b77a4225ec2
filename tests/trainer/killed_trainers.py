"""Kills a trainer at random moments; nothing that it learnt or said may be lost."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trainer.stand_in import Running, Server, until
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.publish.published import Published

STEPS, STEP_S = 10, 0.5
"""Of training before a kill, at most, in which a checkpoint and a judgement come twice; about as long as a step."""

log = logging.getLogger(__name__)


class Killer:
    """Of one trainer.

    Args:
        trainer: not running.
        feed: sends it features, where nobody else does.
        arrived: versions of the drafters that its server was given, in order.
        moments: when to kill.

    Attributes:
        steps: that it was seen at last. saved: of those, what its newest checkpoint holds.
        recovered_s: from the start of its last life to a step beyond those.
    """

    def __init__(
        self, trainer: Running, feed: Callable[[], None], arrived: Callable[[], Sequence[int]], moments: random.Random
    ) -> None:
        self._trainer, self._feed, self._arrived, self._moments = trainer, feed, arrived, moments
        self._start_s = 0.0
        self.saved = self.steps = 0
        self.recovered_s = 0.0

    def kill(self, count: int) -> None:
        """Kills it at random moments of its start and, in turn, of its training and its saves; then lets it live."""
        for turn in range(count):
            with self._trainer.process():
                if turn % 2 == 0:
                    self._train_on(self._moments.randint(0, STEPS))
                time.sleep(self._moments.uniform(0, self._start_s if turn % 2 else STEP_S))
            self._check()
            log.info(
                "kill %d, at step %d: %d are saved, drafter %d",
                *(turn + 1, self.steps, self.saved, max(self._arrived(), default=0)),
            )
        with self._trainer.process() as process:
            before, began = self.saved, time.monotonic()
            self._train_on(1)
            self.recovered_s = time.monotonic() - began
            until(self._arrived, "nothing was published")
            self._trainer.end(process)
        self._check()
        assert self.saved > before

    def _train_on(self, steps: int) -> None:
        """Until it has learnt so many steps more than the last checkpoint holds."""
        began = time.monotonic()
        until(self._trainer.status, "it does not start")
        self._start_s = time.monotonic() - began

        def done() -> bool:
            self.steps = self._trainer.status()["steps"]
            assert self.steps >= self.saved, f"step {self.steps} after {self.saved}"
            self._feed()
            return self.steps >= self.saved + steps

        until(done, "it does not train")

    def _check(self) -> None:
        """That the newest checkpoint is there, versions only grew, and none was given that is not kept."""
        newest = Checkpoints(self._trainer.folder / "checkpoints").newest()
        steps = int(newest.facts["steps"]) if newest else 0
        assert steps >= self.saved
        self.saved = steps
        arrived = list(self._arrived())
        assert arrived == sorted(set(arrived)), arrived
        published = Published(self._trainer.folder).newest()
        assert (published.version if published else 0) >= max(arrived, default=0)
        assert not {"Traceback", "refuses"} & set(self._trainer.log.split()), self._trainer.log


def kill_beside_a_stand_in(folder: Path, count: int, seed: int) -> tuple[Killer, Server]:
    """Where the wire's own classes follow the trainer, and nothing decodes."""
    trainer = Running(folder / "trainer", "passes = 1000.0")
    with Server(folder / "one", trainer.control, trainer.features) as server:

        def arrived() -> list[int]:
            return [each.version for each in server.arrived]

        # of fewer prompts none might be held out, to judge by
        killer = Killer(trainer, lambda: server.push(range(40)), arrived, random.Random(seed))
        killer.kill(count)
    return killer, server
