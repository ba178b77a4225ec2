"""Which requests are followed: features of some, without holes, rather than scraps of all.

A response's length is not known when it begins, so long ones are favoured as they show: once a second the budget is
compared with what following a request costs; where it is too small, those followed requests that are shortest so far
are given up for good, and where there is room, the longest that was not followed yet is, from there on. So the states
of a request are of one run of positions. In a batch that drains, most of what is followed is its long tail.

Pure: the clock is an argument.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EVERY = 1.0
"""Seconds between two comparisons with the budget."""
FIRST_TOKENS_PER_S = 100
"""Of a request, as long as nobody has measured it."""
LOOSE = 0.9
"""Share of what the budget allows up to which others are taken on: rates vary, and who is given up is lost."""


@dataclass(slots=True)
class Follow:
    """Of one request. on: it is followed. over: it was given up, or is never to be; else it may be followed yet."""

    on: bool = False
    over: bool = False

    def give_up(self) -> None:
        self.on, self.over = False, True


class Quota:
    """Decides, for one replica.

    budget: bytes a second, on average. share: of requests that may be followed. row_bytes: of one token's features.
    clock: monotonic seconds.
    """

    def __init__(self, budget: float, share: float, row_bytes: int, clock: Callable[[], float]) -> None:
        self._budget, self._share, self._clock = budget, share, clock
        self._rate = float(FIRST_TOKENS_PER_S * row_bytes)  # bytes a second of one followed request
        self._followed = 0
        self._debt, self._paid = 0.0, clock()  # bytes of prompts, paid off with half of the budget
        self._begin()

    def admit(self, rid: str) -> Follow:
        """A request begins."""
        if zlib.crc32(rid.encode()) >= self._share * 2**32:
            return Follow(over=True)
        self._pay()
        if self._debt < self._budget and (self._followed + 1) * self._rate <= self._room:
            self._followed += 1
            return Follow(on=True)
        return Follow()

    def ended(self, follow: Follow) -> None:
        """A request has ended."""
        self._followed -= follow.on
        follow.give_up()

    def prompts(self, nbytes: int) -> None:
        """So many bytes of prompts are on their way."""
        self._pay()
        self._debt += nbytes

    def step(self, nbytes: int, requests: int) -> bool:
        """A decode step was settled, with so many bytes of features, of so many requests; is it time to `weigh`?"""
        self._nbytes += nbytes
        self._request_steps += requests
        self._steps += 1
        return self._clock() - self._since >= EVERY

    def weigh(self, running: Sequence[tuple[Follow, int]]) -> None:
        """Compares the budget with `running`: the requests of the last step that go on, with their lengths."""
        elapsed = self._clock() - self._since
        if elapsed < 2 * EVERY and self._nbytes:  # else the server was idle in between
            self._rate = self._nbytes / self._request_steps * self._steps / elapsed
        self._pay()
        order = [follow for follow, _ in sorted(running, key=lambda each: each[1])]  # the shortest first
        followed = [follow for follow in order if follow.on]
        allowed = self._room / self._rate
        surplus = max(len(followed) - int(allowed), 0)
        for follow in followed[:surplus]:
            follow.give_up()
        waiting = [follow for follow in reversed(order) if not follow.on and not follow.over]
        taken_on = waiting[: max(int(LOOSE * allowed) - len(followed), 0)]
        for follow in taken_on:
            follow.on = True
        self._followed = len(followed) - surplus + len(taken_on)
        self._begin()

    @property
    def _room(self) -> float:
        return self._budget / 2 if self._debt else self._budget

    def _pay(self) -> None:
        now = self._clock()
        self._debt = max(0.0, self._debt - self._budget / 2 * (now - self._paid))
        self._paid = now

    def _begin(self) -> None:
        self._since, self._nbytes, self._steps, self._request_steps = self._clock(), 0, 0, 0
