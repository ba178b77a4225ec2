"""Whether the drafter in force is one to stay with: accept length on live traffic, held against that of before.

What may have made it worse begins a watch (a drafter put in force, another target, memory released and resumed), and a
verdict ends it (engine/bets.py says which, and how often it is wrong). A watch demands

    all but `MARGIN`         of the drafts that were accepted before, where nothing but the drafter is new
    all but `STALE_MARGIN`   where the target is new too: what that costs is no fault of the drafter's
    and the floor            whatever was before; the floor alone where too little was seen before, as after a start

Before is before the first event that nothing was settled of: of two drafters in a row, the second is not held against
the first unless that one was found as good. A drafter is *trusted* from then on, as is the one of the start; only of
trusted ones is a baseline made.

It does not tell a drafter that is worse from traffic that became harder to draft in the moment of a swap. Pure: the
clock is an argument, and decides nothing; ranks that are told the same come to the same verdict at the same step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt_client.schemas import Watch

from tlt_server.config import Watchfulness
from tlt_server.engine.weights.bets import Stretch, Stretches, Trial, Verdict, lower_bound, mean_of

MARGIN = 0.1
"""Share of the accepted drafts that may be lost. The drafter's KV after a swap is its predecessor's; what that costs,
benchmarks/README.md says."""
STALE_MARGIN = 0.5
MEMORY = 2048
"""Stretches that a baseline is made of: the latest."""
GRACE = 2
"""Steps after an event that are not looked at: launched before it, or drafted from what was left of before."""


class Finding(NamedTuple):
    """The end of a watch. Lengths are accept lengths: tokens of a verify pass, the bonus token included.

    worse: plainly; otherwise the drafter stays.
    found, least, before: the accept length that was found, the least that was demanded, and that of before, if known.
    since: what began the watch.
    steps, seconds: since the last of it.
    under_floor: whether what was found is below the floor.
    """

    worse: bool
    found: float
    least: float
    before: float | None
    since: str
    steps: int
    seconds: float
    under_floor: bool

    def detail(self) -> dict[str, str | int | float | None]:
        """As an event tells it."""
        return {
            "since": self.since,
            "accept_length": round(self.found, 4),
            "least": round(self.least, 4),
            "before": None if self.before is None else round(self.before, 4),
            "steps": self.steps,
            "seconds": round(self.seconds, 6),
        }


class Watchdog:
    """Watches one drafter after another, on one rank.

    mode: for whoever acts on a finding.
    floor: the accept length below which no drafter is worth its while; above 1.
    most: drafts that one pass can accept.
    clock: seconds since 1970.
    """

    def __init__(self, mode: Watchfulness, floor: float, most: int, clock: Callable[[], float]) -> None:
        self.mode = mode
        self.trusted = True
        self._most, self._clock = most, clock
        self._floor = min((floor - 1) / most, 0.99)
        self._stretches = Stretches(most)
        self._baseline: deque[Stretch] = deque(maxlen=MEMORY)
        self._trial: Trial | None = None
        self._since: list[str] = []
        self._before: float | None = None
        self._event, self._steps, self._at = "start", 0, clock()
        self._now: deque[Stretch] = deque(maxlen=64)
        self._drafting = True

    # -- what happens to the weights --

    def swapped(self) -> None:
        """Another drafter is in force. What a trusted one had under a new target is what this one is held against."""
        if self._trial is not None and self.trusted and lower_bound(self._trial.found) is not None:
            self._rest(self._trial.found)
        self.trusted, self._drafting = False, True
        self._watch("drafter")

    def published(self) -> None:
        """The target is another one."""
        self._watch("target")

    def resumed(self) -> None:
        """What was released is in memory again."""
        self._watch("memory")

    def rolled_back(self, *, trusted: bool) -> None:
        """An older drafter is in force again.

        trusted: whether it is one that was found as good, or that of the start. If it was left for one on trial, the
            baseline is its own. A target that came meanwhile is still unproven.
        """
        unproven = [cause for cause in self._since if cause != "drafter"]
        if trusted and self.trusted:
            self._baseline.clear()
        self.trusted, self._drafting = trusted, True
        if not trusted:
            self._watch("drafter")
            return
        self._rest(self._baseline)
        for cause in unproven:
            self._watch(cause)
        self._mark("rollback")

    def probed(self) -> None:
        """Speculation, which was off, is tried again."""
        self._drafting = True
        self._watch("probe")

    def stopped(self) -> None:
        """Speculation is off: there is nothing to see, and nothing that a later drafter could be held against."""
        self._rest([])
        self.trusted, self._drafting = False, False
        self._mark("off")

    # -- what is seen --

    def observe(self, accepted: Sequence[tuple[str, int]]) -> Finding | None:
        """Takes in one step of the drafter in force: accepted drafts, by request. A finding ends the watch."""
        self._steps += 1
        if self._steps <= GRACE:
            return None
        for stretch in self._stretches.add(accepted):
            self._now.append(stretch)
            if self._trial is None:
                if self.trusted:
                    self._baseline.append(stretch)
            elif (verdict := self._trial.add(stretch)) is not None:
                return self._ended(self._trial, verdict)
        return None

    def describe(self) -> Watch:
        """As our routes show it."""
        least = None if self._trial is None else self._length(self._trial.level)
        return Watch(
            mode=self.mode,
            state=self._state(),
            event=self._event,
            event_time=self._at,
            steps=self._steps,
            accept_length=self._mean(self._now),
            before=self._before,
            baseline=self._mean(self._baseline),
            least=least,
        )

    # -- within --

    def _state(self) -> str:
        if not self._drafting:
            return "off"
        if self._trial is not None:
            return "watching"
        if not self.trusted:
            return "worse"
        return "settled" if lower_bound(self._baseline) is not None else "gathering"

    def _watch(self, cause: str) -> None:
        """Begins a watch, or begins the one under way anew: what it has seen was before the event."""
        if not self._drafting:
            return
        if cause not in self._since:
            self._since.append(cause)
        sure = lower_bound(self._baseline)
        margin = STALE_MARGIN if "target" in self._since else MARGIN
        self._trial = Trial(self._floor if sure is None else max(self._floor, sure * (1 - margin)))
        self._mark(cause)

    def _rest(self, baseline: Sequence[Stretch]) -> None:
        """Ends the watch, with what the next one is held against."""
        self._baseline = deque(baseline, MEMORY)
        self._trial, self._since = None, []

    def _mark(self, event: str) -> None:
        self._event, self._steps, self._at = event, 0, self._clock()
        self._before = self._mean(self._baseline)
        self._stretches = Stretches(self._most)
        self._now.clear()

    def _ended(self, trial: Trial, verdict: Verdict) -> Finding:
        worse = verdict is Verdict.WORSE
        found = mean_of(trial.found)
        finding = Finding(
            worse,
            self._length(found),
            self._length(trial.level),
            self._mean(self._baseline),
            " and ".join(self._since),
            self._steps,
            self._clock() - self._at,
            found < self._floor,
        )
        if not worse:
            self.trusted = True
        if not self.trusted:
            self._trial = None
        elif worse or lower_bound(trial.found) is not None:
            self._rest(trial.found)  # also what a new target leaves of a good drafter: so it is from now on
        else:
            self._rest(self._baseline)
        return finding

    def _mean(self, found: Sequence[Stretch]) -> float | None:
        return self._length(mean_of(found)) if found else None

    def _length(self, share: float) -> float:
        return 1 + share * self._most
