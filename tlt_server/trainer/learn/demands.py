"""Training steps that are asked for, by an RL trainer that knows when its own step can spare the time."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tlt_client.schemas import TrainedUntil

log = logging.getLogger(__name__)

POLL_S = 0.005


@dataclass
class _Demand:
    """asked: steps. until: what is waited for. is_due: without any, a judgement alone. taken: of the steps. is_over: it
    has come; of `active`, or was refused."""

    asked: int
    until: TrainedUntil
    is_due: bool
    taken: int = 0
    is_over: bool = False


class Demands:
    """One at a time. Who asks sets the demand, the training thread what becomes of it: so neither needs a lock."""

    def __init__(self) -> None:
        self._now: _Demand | None = None
        self._until: TrainedUntil = "active"  # of the newest
        self.ended = False
        """Whether the trainer ends: nothing is taken any more."""

    async def meet(
        self, steps: int, within_s: float, is_gone: Callable[[], Awaitable[bool]], until: TrainedUntil = "active"
    ) -> tuple[int, bool] | None:
        """Steps that were taken within the time, and whether all is over; None: others are being taken.

        is_gone: whether who asks is; what it asked for is not taken any more, and the next one may ask.
        """
        if self._now is not None:
            return None
        self._now = now = _Demand(steps, until, is_due=not steps and until != "taken")
        self._until = until
        began = time.monotonic()
        try:
            while not (now.is_over or self.ended) and time.monotonic() < began + within_s and not await is_gone():
                await asyncio.sleep(POLL_S)
        finally:
            self._now = None
        took = time.monotonic() - began
        log.info("asked for: %d of %d steps taken, until %s, in %.2f s", now.taken, steps, until, took)
        return now.taken, now.is_over

    def end(self) -> None:
        """Lets nobody wait any longer."""
        self.ended = True

    # -- the training thread --

    @property
    def left(self) -> int:
        """Steps to take."""
        now = self._now
        return now.asked - now.taken if now else 0

    def is_amid(self) -> bool:
        """Whether some of the steps were taken, and others are to be."""
        now = self._now
        return now is not None and 0 < now.taken < now.asked

    def is_due(self) -> bool:
        """Whether a judgement without steps is asked for; once."""
        if (now := self._now) is None or not now.is_due:
            return False
        now.is_due = False
        return True

    def take(self) -> bool:
        """A step was taken; whether it is the last for now, and is to be judged, were who asked for it gone or not."""
        if now := self._now:
            now.taken += 1
            now.is_over = now.until == "taken" and not self.left
        return not self.left and self._until != "taken"

    def settle(self, *, on_its_way: bool = False) -> None:
        """Nothing is left to judge. on_its_way: what was published is."""
        if (now := self._now) and now.taken == now.asked and not now.is_due:
            now.is_over |= now.until == "judged" or not on_its_way
