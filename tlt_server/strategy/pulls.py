"""Which arm a result belongs to, and how long its step took, though results come one step late.

Under overlap SGLang launches step n + 1 before it processes the results of step n. Results come in the order of
launches, so a queue of the launched steps says what each belongs to.

**A step's time** ends when its result is processed, which upstream waits for anyway, and begins when the result before
was processed, or at its own launch where that is later. Under overlap the former is later: the whole step as a user
feels it, the CPU's part that nothing hides included, without an event or a synchronization. Without overlap, and after
idling, the latter is: waiting for requests is nobody's step.
"""

from collections import deque
from typing import NamedTuple

from tlt_server.strategy.arms import Choice

UNDER_WAY = 2
"""Steps launched and not settled, at most: SGLang launches one ahead. A third means that a result was lost, and drops
the oldest; so after a loss one result is credited to the step before its own, and the next are right again."""


class Pull(NamedTuple):
    """A launched decode step.

    cached: tokens in the KV cache, of all requests.
    launched: seconds, on the clock of the results.
    charged: seconds of the exploration's budget that are held for it; 0 where it does not explore.
    behind: tokens of all requests that the drafter has missed.
    """

    arm: Choice
    batch: int
    cached: int
    launched: float
    charged: float = 0.0
    behind: int = 0

    @property
    def reads(self) -> bool:
        """Whether the drafter reads first what it has missed: the step's time is not all its arm's."""
        return self.arm is not None and self.behind > 0


class UnderWay:
    """The launched steps whose results have not come."""

    def __init__(self) -> None:
        self._pulls: deque[Pull | None] = deque()  # None: a break
        self._settled = float("-inf")
        self.lost = 0
        """Steps whose result never came."""
        self.unmatched = 0
        """Results that no launched step has: their batch is another one."""

    def launch(self, pull: Pull) -> None:
        """A step begins."""
        self._pulls.append(pull)
        while len(self._pulls) - self._pulls.count(None) > UNDER_WAY:
            self._drop()

    def interrupt(self) -> None:
        """Something else than a decode step is launched: a prefill, a swap, a pause.

        The time of the decode step that is launched next does not count: it may hold what came before.
        """
        if not (self._pulls and self._pulls[-1] is None):
            self._pulls.append(None)

    def follower(self) -> Pull | None:
        """The step that was launched after the one that was settled last; None if none was yet, or something else."""
        return self._pulls[0] if self._pulls else None

    def settle(self, batch: int, now: float, most_accepted: int = 0) -> tuple[Pull, float | None] | None:
        """The step of a result, and its seconds; None for the seconds where they are not the step's own.

        Args:
            batch: requests in the result.
            now: seconds.
            most_accepted: drafts that one of them had accepted.

        Returns:
            None where no step under way can have this result.
        """
        fitting = (place for place, pull in enumerate(self._pulls) if _fits(pull, batch, most_accepted))
        before = next(fitting, None)
        if before is None:
            self.unmatched += 1
            self._pulls.appendleft(None)  # it took time that is nobody's
            return None
        for _ in range(before):  # lost steps, or breaks
            self.lost += self._pulls.popleft() is not None
        pull = self._pulls.popleft()
        assert pull is not None
        began, self._settled = max(pull.launched, self._settled), now
        return pull, now - began if before == 0 and now > began else None

    def _drop(self) -> None:
        """The oldest step is given up. What comes next follows a gap."""
        while self._pulls.popleft() is None:
            pass
        self.lost += 1
        if self._pulls and self._pulls[0] is not None:
            self._pulls.appendleft(None)


def _fits(pull: Pull | None, batch: int, most_accepted: int) -> bool:
    return pull is not None and pull.batch == batch and most_accepted <= (pull.arm.num_steps if pull.arm else 0)
