"""Whether the active drafter is one to stay with: accept length on live traffic, held against that of before.

A CUSUM in each arm (Page 1954; Wald's test of two normal means). How far a request is from the demanded `level` depends
on the request (variance `between`) and on chance (`within`, each pass): of n passes with s accepted drafts, it adds
(s - n * level) / v to the sum and n / v to what is known, v = within + n * between. The clock decides only of probes.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tlt_client.schemas import Watch

from tlt_server.config import Arm, Watchfulness

MARGIN, STALE_MARGIN = 0.1, 0.5  # share of the accepted drafts that may be lost; the second where the target is new too
GRACE, SOONEST = 2, 10  # steps after an event: not counted, as drafted from what was left of before; without verdict
LEAST, LEAST_REQUESTS, LATEST = 512, 4, 512  # passes and requests that a baseline needs; requests that it keeps
PATIENCE = 32768  # passes after which a drafter that is not plainly worse stays
SHIFTS = 0.1, 0.25, 0.5, 0.9  # of the level: what a worse drafter is supposed to be below it, a good one above
ALARM, PASS = (math.log(len(SHIFTS) / rate) for rate in (1e-3, 1e-2))  # rates at the level, of `worse` and of `as good`
FIRST_S, LONGEST_S = 60.0, 3600.0  # until speculation that was turned off is tried again; each failure doubles it


class Sample(dict[str, tuple[int, int]]):
    """Passes and accepted drafts of each of the latest requests."""

    def add(self, request: str, count: int) -> None:
        n, total = self.get(request, (0, 0))
        self[request] = n + 1, total + count
        if len(self) > LATEST:
            del self[next(iter(self))]

    def enough(self) -> bool:
        return len(self) >= LEAST_REQUESTS and sum(n for n, _ in self.values()) >= LEAST

    def length(self) -> float | None:
        return 1 + sum(total for _, total in self.values()) / sum(n for n, _ in self.values()) if self else None

    def estimate(self, most: int) -> tuple[float, float]:
        """Mean of accepted drafts less three standard errors, and the variance between requests."""
        passes, sums = sum(n for n, _ in self.values()), self.values()
        mean = (sum(total for _, total in sums) + most / 2) / (passes + 1)  # never an end of the range
        within = mean * (most - mean)
        apart = math.fsum((total - n * mean) ** 2 for n, total in sums) * len(self) / (len(self) - 1)
        between = max(0.0, (apart - within * passes) / sum(n**2 for n, _ in sums))
        known = math.fsum(n / (within + n * between) for n, _ in sums)
        return math.fsum(total / (within + n * between) for n, total in sums) / known - 3 / known**0.5, between


class Lane:
    """The watch in one arm, of `most` drafts: what one arm accepts says nothing of another."""

    def __init__(self, most: int, floor: float) -> None:
        self.most, self.floor = most, min(floor - 1, 0.99 * most)
        self.begin(Sample(), [])

    def begin(self, baseline: Sample, since: list[str]) -> None:
        """Begins a watch anew, for these causes; without one it only ends the watch under way."""
        self.baseline, self.since, self.watching, self.trial = baseline, since, bool(since), Sample()
        self.before, self.recent = baseline.length(), deque[int](maxlen=LEAST)
        self.level, self._between, self._passes, self._sum, self._known = self.floor, self.floor**2 / 4, 0, 0.0, 0.0
        if since and baseline.enough():
            sure, self._between = baseline.estimate(self.most)
            self.level = max(self.floor, sure * (1 - (STALE_MARGIN if "target" in since else MARGIN)))

    def add(self, request: str, count: int) -> bool | None:
        """Takes in a pass; returns whether the drafter is worse, once that is plain."""
        n, total = self.trial.get(request, (0, 0))
        self.trial.add(request, count)
        within = self.level * (self.most - self.level)  # as large as it can be, with this mean
        old, new = (within + min(passes, LEAST) * self._between for passes in (n, n + 1))  # a long one is as several
        self._sum += (total + count - (n + 1) * self.level) / new - (total - n * self.level) / old
        self._known, self._passes = self._known + (n + 1) / new - n / old, self._passes + 1
        self.found, shifts = self.level + self._sum / self._known, [share * self.level for share in SHIFTS]
        worse, as_good = (max(d * sign * self._sum - d * d / 2 * self._known for d in shifts) for sign in (-1, 1))
        passed = (as_good >= PASS and self.trial.enough()) or self._passes >= PATIENCE
        return not passed if passed or worse >= ALARM else None


class Watchdog:
    """Sees the steps of all arms. A drafter is `trusted` once it was found as good in one; that of the start is."""

    def __init__(self, arms: Sequence[Arm], mode: Watchfulness, floor: float, clock: Callable[[], float]) -> None:
        self.mode, self._clock, self.trusted = mode, clock, True
        self._lanes = {arm: Lane(arm.num_steps, floor) for arm in arms}
        self._newest = self._lanes[arms[0]] if arms else Lane(1, floor)
        self._target: int | None = None
        self._probe_at: float | None = None
        self._wait, self._event, self._steps, self._at = FIRST_S, "start", 0, clock()

    def hear(self, event: str, *, trusted: bool = False, probe: bool = False) -> None:
        """An event of `Watch`. trusted: what is rolled back to; probe: what goes off is to be tried again later."""
        if self._event == "off" and event in ("target", "memory"):
            return
        cause = event if event != "rollback" else "drafter"
        for lane in self._lanes.values():
            baseline, since = lane.baseline, [each for each in lane.since if each != cause]
            if event == "off" or (trusted and self.trusted):  # back from a drafter that made the baseline its own
                baseline = Sample()
            elif event == "drafter" and self.trusted and lane.trial.enough():
                baseline, since = lane.trial, []  # what it has under a new target
            lane.begin(baseline, [] if event == "off" else since if trusted else [*since, cause])
        if event in ("drafter", "rollback", "off"):
            self.trusted, self._wait = trusted, self._wait if event == "off" else FIRST_S
        self._target, self._probe_at = None, self._clock() + self._wait if probe else None
        self._wait = min(2 * self._wait, LONGEST_S) if probe else self._wait
        self._event, self._steps, self._at = event, 0, self._clock()

    def observe(self, arm: Arm, accepted: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
        """Takes in one step of the active drafter: accepted drafts by request. What it found ends an arm's watch."""
        self._newest = lane = self._lanes[arm]
        self._steps += 1
        for request, count in accepted if self._steps > GRACE else ():
            lane.recent.append(count)
            if lane.watching and (worse := lane.add(request, count)) is not None and self._steps >= SOONEST:
                return self._ended(lane, worse)
            if not lane.watching and self.trusted:
                lane.baseline.add(request, count)
        return None

    def _ended(self, lane: Lane, worse: bool) -> dict[str, Any]:
        told: dict[str, Any] = {"accept_length": 1 + lane.found, "least": 1 + lane.level, "before": lane.before}
        told = {name: length and round(length, 4) for name, length in told.items()}
        told |= {"worse": worse, "under_floor": lane.found < lane.floor, "since": " and ".join(lane.since)}
        self.trusted, lane.watching = self.trusted or not worse, False
        self._wait = self._wait if worse else FIRST_S
        if self.trusted:  # if it is worse, target or memory made it so: it is how it is from now on
            lane.baseline, lane.since = lane.trial if worse or lane.trial.enough() else lane.baseline, []
        return {**told, "steps": self._steps, "seconds": round(self._clock() - self._at, 6)}

    def describe(self) -> Watch:
        """As our routes show it: what is seen in the arm of the newest step."""
        lane, recent = self._newest, self._newest.recent
        settled = "settled" if lane.baseline.enough() else "gathering"
        state = "watching" if lane.watching else settled if self.trusted else "off" if self._event == "off" else "worse"
        seen = 1 + sum(recent) / len(recent) if recent else None, lane.before, lane.baseline.length()
        least, probe_at = 1 + lane.level if lane.watching else None, self._probe_at if self.mode == "armed" else None
        return Watch(self.mode, state, self._event, self._at, self._steps, *seen, least, probe_at)

    def probe_due(self, target: int) -> str | None:
        """Why to probe now, if that is due. `target`: the active version, its publication complete."""
        if self._probe_at is None or self.mode != "armed":  # nothing would end it
            return None
        if self._target not in (None, target):
            self._wait = FIRST_S
            return f"the target is now version {target}"
        self._target = target
        return "it was off for a while" if self._clock() >= self._probe_at else None
