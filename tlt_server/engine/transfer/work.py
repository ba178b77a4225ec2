"""Work apart from the scheduler's loop, which looks between two steps how far it is."""

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """In the order in which the ranks agree on the lowest: one that failed, fails for all."""

    FAILED = 0
    UNDER_WAY = 1
    HANDED = 2
    OVER = 3


class Work(threading.Thread):
    """Runs `do`, which may hand things over, one after the other. A daemon: what it waits for may never come, and the
    process ends all the same."""

    def __init__(self, do: Callable[["Work"], Any]) -> None:
        super().__init__(daemon=True, name="weight-transfer")
        self._do = do
        self._changed = threading.Condition()
        self._phase, self._given_up = Phase.UNDER_WAY, False
        self.handed: Any = None
        """What waits to be taken, while the phase is HANDED."""
        self.result: Any = None
        """What `do` returned, once the phase is OVER; the exception that it raised, once it is FAILED."""

    def run(self) -> None:
        try:
            result, phase = self._do(self), Phase.OVER
        except BaseException as error:  # noqa: BLE001 - an edge: the scheduler tells the trainer, and serves on
            result, phase = error, Phase.FAILED
        with self._changed:
            self.result, self._phase = result, phase
            self._changed.notify_all()

    def hand(self, thing: Any) -> None:
        """Within `do`: returns once the thing is taken. Raises RuntimeError: nobody will."""
        with self._changed:
            self.handed, self._phase = thing, Phase.HANDED
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._phase is not Phase.HANDED or self._given_up)
            if self._given_up:
                raise RuntimeError("given up")

    def phase(self, within_s: float) -> Phase:
        """How far it is; within a time, if that is no further."""
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not Phase.UNDER_WAY, within_s)
            return self._phase

    def take(self) -> None:
        """The work goes on: what it handed over is done with."""
        with self._changed:
            self.handed, self._phase = None, Phase.UNDER_WAY
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody will take what it hands over any more."""
        with self._changed:
            self._given_up, self.handed = True, None
            self._changed.notify_all()
