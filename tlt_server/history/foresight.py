"""What history has for the requests that run, before a step of it is chosen."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_server.history.calibration import Calibration
from tlt_server.history.index import Drafts, History, Numbers

EVERY = 4
"""Steps in which each request is looked up once, a part of them in each: as many as between two decisions
(strategy/bandit.py)."""

Present = Callable[[], tuple[Sequence[int], int]]
"""Which responses are to be looked up, and of how many requests."""


class Foresight:
    """Looks drafts up, and learns what they are worth. What the rank that decides looks up beside changes no draft.

    responses: that there can be, numbered from 0. deepest: tokens that are looked for, up to `DEEPEST`.
    """

    def __init__(self, responses: int, deepest: int) -> None:
        self.calibration = Calibration()
        self._deepest = deepest
        self._expected = np.zeros((responses, deepest))
        self._new, self._changed = set[int](), False
        self._of, self._at, self._steps, self._drafted = 0, 0, 0, False
        self._reading = np.zeros(0, np.uint32)

    def begun(self, responses: Iterable[int]) -> None:
        """What is known of them, is not of theirs any more."""
        self._new.update(responses)
        self._changed = True

    def changed(self) -> None:
        """Others are there than before."""
        self._changed = True

    def stepped(self) -> None:
        """A result has come."""
        self._steps = min(self._steps + 1, EVERY)

    @property
    def due(self) -> bool:
        return self._changed or self._steps > 0

    def draft(self, index: History, responses: Numbers, most: int) -> Drafts:
        """For a step; which looks them up by the way."""
        drafts, expected = index.look(responses, most, self._deepest, self.calibration.rates)
        self._expected[responses] = expected
        self._new.clear()
        self._drafted = True
        return drafts

    def lengths(self, index: History, present: Present) -> list[float] | None:
        """Expected accept length of a step of the present requests, by tokens drafted from one on; a mean over all of
        them, the bonus token included. None: as last time."""
        anew = self._changed
        if anew:
            reading, self._of = present()
            self._reading = np.array(reading, np.uint32)
        before, steps = self._at, self._steps
        self._at, self._steps, self._changed = (before + steps) % EVERY, 0, False
        if steps and self._at <= before:
            anew = True
            if (judged := index.judged()).looks[0] or judged.tokens.any():
                self.calibration.learn(judged)
        wanted = self._wanted(before, steps)
        if len(wanted):
            self._expected[wanted] = index.look(wanted, 0, self._deepest, self.calibration.rates)[1]
        if not anew:
            return None
        if not len(self._reading):
            return [1.0] * self._deepest
        promised = self._expected[self._reading].mean(axis=0).cumsum()
        means: list[float] = (1 + self.calibration.corrected(promised) * len(self._reading) / self._of).tolist()
        return means

    def _wanted(self, before: int, steps: int) -> NDArray[np.uint32]:
        """Who is to be looked up: who is new, and a part of all for each step, unless those looked all up."""
        drafted, self._drafted = self._drafted, False
        parts = [] if drafted else [self._reading[(before + step) % EVERY :: EVERY] for step in range(1, steps + 1)]
        if self._new:
            parts.append(np.array([each for each in self._reading.tolist() if each in self._new], np.uint32))
            self._new.clear()
        return np.concatenate(parts) if parts else self._reading[:0]
