"""Which launched step a result belongs to, and how long that step took.

Under overlap SGLang launches step n + 1 before it processes the results of step n; results come in the order of
launches. A step ends when its result is processed, and begins when the one before was, or at its own launch where that
is later: the whole step as a user feels it, without an event or a synchronization. Its time is its own only if nothing
but decode steps is launched from the step before to its result: a prefill before it runs first, and the launch of one
behind it, kernel by kernel, can keep its result waiting. So can the launch of the next step, where that takes the CPU
longer than the step takes the GPU: the step is late then, and its time the next one's doing.
"""

from collections import deque
from typing import NamedTuple

from tlt_server.strategy.arms import Choice

UNDER_WAY = 2
"""Steps launched and not settled, at most: SGLang launches one ahead. A third means that a result was lost."""


class Pull(NamedTuple):
    """A launched decode step.

    cached: tokens in the KV cache, of all requests. launched: seconds. charged: seconds of the exploration budget that
    are held for it. behind: tokens that the drafter has missed, and reads first. alone: nothing else has been launched
    since.
    """

    arm: Choice
    batch: int
    cached: int
    launched: float
    charged: float = 0.0
    behind: int = 0
    alone: bool = True

    @property
    def reads(self) -> bool:
        """Whether the step's time holds what the drafter reads first."""
        return self.arm is not None and self.behind > 0

    def fits(self, batch: int, most_accepted: int) -> bool:
        """Whether it can have such a result."""
        return self.batch == batch and most_accepted <= (self.arm.num_steps if self.arm else 0)


class UnderWay:
    """Launched steps whose results have not come. lost: results that never came; unmatched: results of no step."""

    def __init__(self) -> None:
        self._pulls: deque[Pull | None] = deque()  # None: a break
        self._settled = float("-inf")
        self.lost = self.unmatched = 0

    def launch(self, pull: Pull) -> None:
        """A step begins."""
        self._pulls.append(pull)
        if len(self._pulls) - self._pulls.count(None) > UNDER_WAY:
            while self._pulls.popleft() is None:
                pass
            self.lost += 1
            if self._pulls[0] is not None:
                self._pulls.appendleft(None)  # what comes next follows a gap

    def interrupt(self) -> None:
        """A prefill, a swap or a pause is launched: the time of the decode step behind it does not count, nor that of
        the one before, if its result has not come yet."""
        newest = self._pulls[-1] if self._pulls else None
        if newest is not None:
            self._pulls[-1] = newest._replace(alone=False)
        if newest is not None or not self._pulls:
            self._pulls.append(None)

    def followed_by(self, arm: Choice) -> bool:
        """Whether the step after the one that was settled last has this arm, or has not been launched."""
        return not self._pulls or (self._pulls[0] is not None and self._pulls[0].arm == arm)

    @property
    def waits_for_reading(self) -> bool:
        """Whether the step after the one that was settled last begins with what the drafter reads."""
        return bool(self._pulls and self._pulls[0] and self._pulls[0].reads)

    def settle(self, batch: int, now: float, most_accepted: int = 0) -> tuple[Pull, float | None] | None:
        """The step of a result, and its seconds, None where they are not its own; None where no step has such a one."""
        place = next((i for i, pull in enumerate(self._pulls) if pull and pull.fits(batch, most_accepted)), None)
        if place is None:
            self.unmatched += 1
            self._pulls.appendleft(None)  # it took time that is nobody's
            return None
        self.lost += sum(self._pulls.popleft() is not None for _ in range(place))
        pull = self._pulls.popleft()
        assert pull is not None
        began, self._settled = max(pull.launched, self._settled), now
        return pull, now - began if place == 0 and pull.alone and now > began else None
