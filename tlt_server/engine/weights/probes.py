"""When speculation that the watchdog has turned off is tried again: once the target is another one, or after a while.

What made a drafter useless may have passed without a new one: prompts that nobody could draft for, a target that came
back. What is still useless is found after a thousand verify passes or so (engine/bets.py), each of which takes longer
than plain decoding: seconds, which is little once, and much all the time. Pure: the clock is an argument. Rank 0 alone
goes by it, and tells the others.
"""

from collections.abc import Callable

FIRST_S = 60.0
"""Until the first probe: about an RL step's rollouts, of other prompts."""
LONGEST_S = 3600.0
"""Between two: what fails each time costs less than a step in a thousand then."""


class Probes:
    """`at`: when the next one is due, in the clock's seconds; None: none is. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait = FIRST_S
        self._target: int | None = None
        self.at: float | None = None

    def failed(self) -> None:
        """Speculation was turned off, in a probe or not; each time in a row doubles the wait."""
        self.at = self._clock() + self._wait
        self._wait = min(2 * self._wait, LONGEST_S)
        self._target = None

    def due(self, target: int) -> str | None:
        """Why a probe is to begin now; None where none is. `target`: version in force, its publication complete."""
        if self.at is None:
            return None
        if self._target is None:
            self._target = target
        if target != self._target:
            self._wait = FIRST_S
            return f"the target is now version {target}"
        return "it was off for a while" if self._clock() >= self.at else None

    def began(self) -> None:
        """A probe is under way."""
        self.at = None

    def passed(self) -> None:
        """There is nothing to probe: the drafter is worth its while, or another one."""
        self.at, self._wait = None, FIRST_S
