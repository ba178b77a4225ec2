"""One clock for all phases of a step, so that what is between them shows."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by phase since it was made.

    now: seconds of a monotonic clock. settle: waits for what a device was asked before: else a phase would end when its
    work is launched. ended: told of each phase that is over; what that takes is of no phase.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        settle: Callable[[], None] = lambda: None,
        ended: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._now, self._settle, self._ended, self._began = now, settle, ended, now()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Phases do not lie in one another; one that comes again adds to itself."""
        began = self._now()
        yield
        self._settle()
        self._seconds[name] += self._now() - began
        self._ended(name)

    def seconds(self) -> dict[str, float]:
        """Of each phase so far; `whole` is all since the beginning, what was in no phase included."""
        return {**self._seconds, "whole": self._now() - self._began}
