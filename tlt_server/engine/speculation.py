"""Whether decode steps speculate: as it was asked for, unless something speaks against it."""

from typing import Any

from tlt_client.schemas import Arm, Mode
from tlt_client.schemas import Speculation as Described

from tlt_server.engine.events import EventLog


class Speculation:
    """The switch of one scheduler process, turned between two steps, and on all ranks alike.

    held: why steps do not speculate, whatever is asked for.
    worker: `EagleWorker`; None: the server was started without a drafter, and never speculates.
    arm: of steps that speculate.
    """

    def __init__(self, worker: Any, arm: Arm | None, events: EventLog) -> None:
        self._worker, self._arm, self._events = worker, arm, events
        self._mode: Mode = "off" if worker is None else "pinned"
        self.held: str | None = None

    @property
    def on(self) -> bool:
        return self._worker is not None and bool(self._worker.speculating)

    def describe(self) -> Described:
        """As our routes show it."""
        return Described(self._mode, self.on, self.held, self._arm)

    def wish(self, mode: Mode) -> None:
        """What is asked for."""
        self._mode = mode
        self._apply("it was asked for")

    def hold(self, why: str) -> None:
        """Keeps speculation off, whatever is asked for, until it is released."""
        self.held = why
        self._apply(why)

    def release(self, why: str) -> None:
        """Nothing speaks against speculation any more."""
        self.held = None
        self._apply(why)

    def _apply(self, why: str) -> None:
        on = self._mode != "off" and self.held is None
        if on != self.on:
            self._worker.speculating = on
            self._events.add("speculation_on" if on else "speculation_off", why=why)
