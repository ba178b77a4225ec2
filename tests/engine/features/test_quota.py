"""Who is followed: within the budget, once and for all, and the long ones rather than the short."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.features.quota import Follow, Quota

ROW = 8192


@dataclass
class Replica:
    """Requests that all get a token a step, as many steps a second as it likes. sent: bytes by second."""

    budget: float
    share: float = 1.0
    step: float = 0.01
    time: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)
    running: dict[int, tuple[Follow, int, int]] = field(default_factory=dict)
    followed: dict[int, list[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.quota = Quota(self.budget, self.share, ROW, lambda: self.time)

    def begin(self, length: int, prompt: int = 0) -> None:
        number = len(self.followed)
        follow = self.quota.admit(f"r{number}")
        if follow.on:
            self.quota.prompts(prompt * ROW)
            self._note(prompt * ROW)
        self.running[number], self.followed[number] = (follow, 0, length), []

    def decode(self) -> None:
        self.time += self.step
        nbytes = 0
        for number, (follow, done, length) in list(self.running.items()):
            self.followed[number].append(follow.on)
            nbytes += ROW * follow.on
            self.running[number] = (follow, done + 1, length)
            if done + 1 == length:
                self.quota.ended(follow)
                del self.running[number]
        self._note(nbytes)
        if self.quota.step(nbytes, nbytes // ROW):
            self.quota.weigh([(follow, done) for follow, done, _ in self.running.values()])

    def _note(self, nbytes: float) -> None:
        self.sent[int(self.time)] = self.sent.get(int(self.time), 0) + nbytes


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([2e6, 10e6, 50e6]), st.sampled_from([0.005, 0.02]))
def test_the_budget_holds_and_a_request_is_followed_in_one_run(seed: int, budget: float, step: float) -> None:
    """Others begin as long as there are any; a step takes the less, the fewer run."""
    draw = random.Random(seed)
    replica, left = Replica(budget), 192
    while left or replica.running:
        while left and len(replica.running) < 64:
            replica.begin(int(100 * 2 ** draw.uniform(0, 5)), prompt=draw.randint(0, 50))
            left -= 1
        replica.step = step * (0.5 + len(replica.running) / 128)
        replica.decode()
    after = [replica.sent[second] for second in sorted(replica.sent)[3:-1]]
    assert sum(after) <= 1.1 * budget * max(len(after), 1)
    for history in replica.followed.values():
        changes = sum(one != other for one, other in zip([False, *history], [*history, False], strict=True))
        assert changes <= 2


def test_what_is_long_is_favoured() -> None:
    """Of 200 requests a tenth are long; there is budget for a tenth of them at once."""
    replica = Replica(20 * 100 * ROW)
    for number in range(200):
        replica.begin(3000 if number % 10 == 0 else 300)
    while replica.running:
        replica.decode()
    shares: dict[int, list[float]] = {300: [], 3000: []}
    for history in replica.followed.values():
        shares[len(history)].append(sum(history) / len(history))
    long, short = (sum(shares[length]) / len(shares[length]) for length in (3000, 300))
    assert long > 0.7
    assert short < 0.2


class Second:
    """A quota whose clock goes on by a second and a hundred steps at a time; a step of a request is a row."""

    def __init__(self, requests: float) -> None:
        """requests: that the budget allows."""
        self.time = 0.0
        self.quota = Quota(requests * 100 * ROW, 1.0, ROW, lambda: self.time)

    def passes(self, running: list[tuple[Follow, int]], steps: int = 100) -> None:
        for _ in range(steps):
            self.time += 1.0001 / steps
            self.settle(running)

    def settle(self, running: list[tuple[Follow, int]]) -> None:
        followed = sum(follow.on for follow, _ in running)
        if self.quota.step(ROW * followed, followed):
            self.quota.weigh(running)


def test_the_shortest_are_given_up_for_good() -> None:
    second = Second(4.5)
    running = [(second.quota.admit(str(length)), length) for length in (30, 10, 40, 20)]
    second.passes(running, steps=200)  # each costs twice as much
    assert [length for follow, length in running if follow.on] == [30, 40]
    second.passes(running, steps=10)
    assert [length for follow, length in running if follow.on] == [30, 40]
    assert all(follow.over for follow, length in running if length < 30)


def test_the_longest_that_waits_is_taken_on() -> None:
    second = Second(2.5)
    running = [(second.quota.admit(str(length)), length) for length in (30, 10, 50, 60, 40)]
    assert [length for follow, length in running if follow.on] == [30, 10]
    second.passes(running, steps=60)
    assert [length for follow, length in running if follow.on] == [30, 10, 60]


def test_a_server_that_was_idle_says_nothing_about_what_a_request_costs() -> None:
    second = Second(2.5)
    running = [(second.quota.admit(str(length)), length) for length in (10, 20, 30, 40)]
    second.passes(running)
    second.time += 60
    second.settle(running)
    assert [follow.on for follow, _ in running] == [True, True, False, False]


def test_there_is_room_again_when_requests_have_ended() -> None:
    """Also where none goes on that would show it."""
    replica = Replica(10 * 100 * ROW)
    for _ in range(3):
        for _ in range(10):
            replica.begin(5)
        assert all(follow.on for follow, *_ in replica.running.values())
        while replica.running:
            replica.decode()
        replica.time += 60


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_share_is_of_the_requests(share: float) -> None:
    replica = Replica(1e12, share)
    for _ in range(1000):
        replica.begin(200)
    assert sum(follow.on for follow, *_ in replica.running.values()) == pytest.approx(1000 * share, abs=60)
    for _ in range(150):
        replica.decode()
    assert sum(follow.on for follow, *_ in replica.running.values()) == pytest.approx(1000 * share, abs=60)


def test_prompts_are_paid_for() -> None:
    """Long ones that come at once are not all followed; what they cost is made up for later."""
    replica = Replica(10 * 100 * ROW)
    for _ in range(10):
        replica.begin(10, prompt=600)
    assert [follow.on for follow, *_ in replica.running.values()] == [True] * 2 + [False] * 8
    replica.time += 10
    assert replica.quota.admit("another").on
