"""Live traffic as the watchdog sees it: recorded requests, and a model of requests that differ more than those do."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tlt_server.config import Arm
from tlt_server.engine.weights.watchdog import Watchdog

Step = list[tuple[str, int]]
Request = list[int]
MOST = 3
ARM = Arm(MOST, 1, MOST + 1)


def recorded() -> dict[str, list[Request]]:
    """Accepted drafts of each pass of a request, by drafter; accepted.txt says how they were recorded."""
    found: dict[str, list[Request]] = defaultdict(list)
    for line in (Path(__file__).parent / "accepted.txt").read_text().splitlines():
        if not line.startswith("#"):
            drafter, _, counts = line.partition(": ")
            found[drafter].append([int(count) for count in counts])
    return found


def one_of(requests: list[Request]) -> Callable[[random.Random], Request]:
    return lambda draw: draw.choice(requests)


def modelled(accept: float, spread: float, kept: float = 1.0) -> Callable[[random.Random], Request]:
    """Requests of which each has an acceptance of its own, normal with this mean and deviation, and a length from a
    long tail (log-normal, median 100 passes, at most 5000). A draft is accepted with it, until one is not. `kept`: of
    the accepted drafts, what a worse drafter has left."""

    def request(draw: random.Random) -> Request:
        own = min(max(draw.gauss(accept, spread), 0.02), 0.98)
        passes = int(min(5000, 100 * math.exp(1.2 * draw.gauss(0, 1)))) + 1
        counts = (next((k for k in range(MOST) if draw.random() >= own), MOST) for _ in range(passes))
        return [sum(draw.random() < kept for _ in range(count)) if kept < 1 else count for count in counts]

    return request


class Traffic:
    """`batch` requests at a time, each followed by another one; the first ones are under way. `drafter` may change."""

    def __init__(self, seed: int, batch: int, drafter: Callable[[random.Random], Request]) -> None:
        self._draw, self._made = random.Random(seed), 0
        self.drafter = drafter
        self._running = [self._request(under_way=True) for _ in range(batch)]

    def _request(self, under_way: bool = False) -> tuple[str, Iterator[int]]:
        self._made += 1
        counts = self.drafter(self._draw)
        return str(self._made), iter(counts[self._draw.randrange(len(counts)) :] if under_way else counts)

    def swap(self, drafter: Callable[[random.Random], Request]) -> None:
        """Requests under way go on as long as they would, with what the other drafter has accepted."""
        self.drafter = drafter
        self._running = [(rid, iter(self._stretched(len(list(left))))) for rid, left in self._running]

    def _stretched(self, passes: int) -> Request:
        counts: Request = []
        while len(counts) < passes:
            counts += self.drafter(self._draw)
        return counts[:passes]

    def step(self) -> Step:
        step = []
        for i, (_, counts) in enumerate(self._running):
            while (count := next(counts, None)) is None:
                self._running[i] = self._request()
                counts = self._running[i][1]  # noqa: PLW2901 - of the request that took its place
            step.append((self._running[i][0], count))
        return step


def feed(dog: Watchdog, traffic: Traffic, passes: int) -> dict[str, Any] | None:
    """The finding, if there is one within so many passes."""
    seen = 0
    while seen < passes:
        step = traffic.step()
        seen += len(step)
        if finding := dog.observe(ARM, step):
            return finding
    return None
