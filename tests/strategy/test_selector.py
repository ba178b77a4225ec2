"""What holds of a selector whatever a server does: where arms may run, what exploration costs, what is kept."""

from collections.abc import Mapping
from itertools import groupby, pairwise
from math import log
from random import Random
from statistics import fmean
from time import perf_counter

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tlt_client import schemas

from tests.strategy.kit import BUCKETS, CAPTURED, DEEP, LARGEST, MS, SHALLOW, TREE, costs, selector
from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import ArmTable, Bucket, Choice
from tlt_server.strategy.costs import StepCosts, Timing
from tlt_server.strategy.defaults import default_buckets, untimed_buckets
from tlt_server.strategy.estimates import Learned
from tlt_server.strategy.selector import Selector

MODES = st.sampled_from(["bandit", "paper", "off", "pinned"])
BATCHES = st.lists(st.integers(1, LARGEST), min_size=1, max_size=150)


def update(mode: str, **fields: float) -> schemas.StrategyUpdate:
    return schemas.StrategyUpdate(mode=mode, pinned=schemas.Arm(3, 2, 6), **fields)


class Server:
    """A scheduler that launches one step ahead. An arm takes `slower` times as long as timed. Of drafts a request
    accepts all, or none, whatever the arm: as of one drafter, a chain begins as a deeper one.

    reading: seconds that the drafter takes, before a step with an arm, for each plain step that it missed.
    late: the step's launch waits until the drafter has read, so that the result of the step before is settled late.
    launch_s: that the launch of each arm takes, behind which the result of the step before is settled.
    cpu_s: that the launch of each arm takes the CPU, while the step before runs.
    """

    def __init__(
        self,
        chosen: Selector,
        random: Random,
        slower: dict[Choice, float] | None = None,
        reading: float = 0.0,
        late: bool = False,
        launch_s: Mapping[Choice, float] | None = None,
        cpu_s: Mapping[Choice, float] | None = None,
    ) -> None:
        self.selector, self.random, self.slower, self.reading = chosen, random, slower or {}, reading
        self.late, self.launch_s, self.cpu_s = late, launch_s or {}, cpu_s or {}
        self.settled = 0.0
        self.missed, self.read = 0, 0.0
        self.now = self.free = 0.0
        self.waiting: tuple[int, list[int], float] | None = None
        self.pulled: list[tuple[int, Choice, float]] = []

    def step(self, batch: int) -> None:
        arm = self.selector.table().arm(batch)
        self.selector.launched(arm, batch, 100 * batch, self.free, self.missed * batch)
        reads = self.reading * self.missed if arm else 0.0
        if self.waiting is not None:
            if self.late:
                self.now += reads
            came = self.now + self.launch_s.get(arm, 0.0)
            if late := (asked := self.settled + self.cpu_s.get(arm, 0.0)) > came:
                self.now = came = asked  # the GPU has waited for the launch, too
            self.settled = came
            self.selector.settled(*self.waiting[:2], came, late)
        seconds = MS[arm] / 1000 * self.slower.get(arm, 1.0) * self.random.uniform(0.95, 1.05)
        self.read += reads
        seconds += 0.0 if self.late else reads
        self.missed = 0 if arm else min(self.missed + 1, 128)
        self.free, self.now = self.now, self.now + seconds
        depth = arm.num_steps if arm else 0
        self.waiting = batch, [depth * self.random.randint(0, 1) for _ in range(batch)], self.now
        self.pulled.append((batch, arm, seconds))


@given(MODES, BATCHES, st.integers(0, 5))
def test_no_arm_runs_beyond_the_sizes_it_was_captured_for(mode: str, batches: list[int], seed: int) -> None:
    server = Server(selector(seed), Random(seed))
    server.selector.configure(update(mode))
    for batch in batches:
        server.step(batch)
    assert all(arm is None or batch <= CAPTURED[arm] for batch, arm, _ in server.pulled)


@given(BATCHES, st.integers(0, 5))
def test_no_arm_runs_outside_of_its_buckets(batches: list[int], seed: int) -> None:
    """Off as little as any other: requests that end may leave a bucket that looks at off for one that has none."""
    buckets = (Bucket(1, (SHALLOW, TREE)), Bucket(5, (SHALLOW, DEEP, None)), Bucket(65, (None,)))
    server = Server(Selector(costs(), CAPTURED, LARGEST, buckets, Random(seed)), Random(seed))
    server.selector.configure(update("bandit", exploration=0.5))
    for batch in batches * 3:
        server.step(batch)
    for batch, arm, _ in server.pulled:
        assert arm in next(bucket.arms for bucket in reversed(buckets) if batch >= bucket.first)


@given(MODES, BATCHES, st.integers(0, 5))
def test_equal_seeds_and_results_give_equal_decisions(mode: str, batches: list[int], seed: int) -> None:
    servers = [Server(selector(seed), Random(seed)) for _ in range(2)]
    for server in servers:
        server.selector.configure(update(mode, epsilon=0.5))
        for batch in batches:
            server.step(batch)
    assert servers[0].pulled == servers[1].pulled


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1.0, 50.0)), min_size=1, max_size=8),
    st.floats(0.0, 0.1),
    st.integers(0, 5),
)
@example([(59, 2.0), (15, 32.0), (9, 1.0), (9, 22.0)], 0.0625, 5)  # reading, before a slow arm, was thought to take 2 s
def test_exploration_never_loses_more_than_its_share(phases: list[tuple[int, float]], share: float, seed: int) -> None:
    """At every launch, though arms turn out many times slower than timed: what has been lost so far exceeds the share
    of the time so far by no more than the two steps of looks that may be chosen before the first is settled.
    """
    server = Server(selector(seed), Random(seed))
    server.selector.configure(update("bandit", exploration=share))
    longest = 0.0
    for batch, slower in phases:
        server.slower = {arm: server.random.choice([1.0, slower]) for arm in MS}
        server.selector.weights_changed()
        for _ in range(60):
            server.step(batch)
            longest = max(longest, server.pulled[-1][2])
            report = server.selector.report()
            assert report.explored_lost_s <= share * server.now + 2 * longest


def test_a_look_waits_until_it_is_affordable() -> None:
    """A share of 1 % of steps of 8 ms: a look that loses 4 ms, once in 50 steps; no share, none."""
    looks = {}
    for share in (0.0, 0.01):
        server = Server(selector(), Random(0))
        server.selector.configure(update("bandit", exploration=share))
        for _ in range(2000):
            server.step(32)
        in_force = max(MS, key=[arm for _, arm, _ in server.pulled].count)
        looks[share] = sum(arm != in_force for _, arm, _ in server.pulled[100:])
    assert looks[0.0] == 0
    assert 20 < looks[0.01] < 2000 * 0.01 / 0.1


@given(BATCHES, st.integers(0, 5))
def test_what_was_learned_survives_a_restart(batches: list[int], seed: int) -> None:
    server = Server(selector(seed), Random(seed))
    for batch in batches:
        server.step(batch)
    kept = msgspec.json.encode(server.selector.learned())
    restarted = selector()
    restarted.restore(msgspec.json.decode(kept, type=Learned))
    assert msgspec.json.encode(restarted.learned()) == kept


@pytest.mark.parametrize("reading", [(0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, -1e9)])
def test_a_reading_that_nobody_had_ends_nothing(reading: tuple[float, float, float]) -> None:
    server = Server(selector(), Random(0))
    server.selector.restore(msgspec.structs.replace(server.selector.learned(), reading=reading))
    for _ in range(200):
        server.step(1)
    assert len({arm for _, arm, _ in server.pulled}) > 1


def test_a_warm_restart_begins_where_it_ended() -> None:
    """Timing called a shallow chain slow, and it is fast."""
    server = Server(selector(), Random(0), {SHALLOW: 0.3})
    assert server.selector.table().arm(4) != SHALLOW
    for _ in range(1500):
        server.step(4)
    restarted = selector()
    restarted.restore(server.selector.learned())
    assert restarted.table().arm(4) == SHALLOW


@pytest.mark.parametrize("slower", [10.0, 30.0, 1000.0])
def test_an_arm_that_was_thought_very_slow_is_tried_again(slower: float) -> None:
    """Though its step seems to lose more than exploration can save up, and it is the fastest."""
    server = Server(selector(), Random(0), {SHALLOW: 0.3})
    known = server.selector.learned()
    arms = tuple((arm, odds, log(slower) if arm == SHALLOW else own) for arm, odds, own in known.arms)
    server.selector.restore(msgspec.structs.replace(known, arms=arms))
    while server.now < 30:
        server.step(8)
    assert server.selector.table().arm(8) == SHALLOW


def test_learned_of_another_server_is_taken_as_far_as_it_fits() -> None:
    server = Server(selector(), Random(0))
    for _ in range(50):
        server.step(4)
    other = Selector(costs({None: 5.0, Arm(5, 1, 6): 9.0}), {Arm(5, 1, 6): 8}, 8, BUCKETS[2:], Random(0))
    other.restore(server.selector.learned())
    ours, theirs = server.selector.learned(), other.learned()
    assert theirs.level == ours.level
    assert [each for each in theirs.arms if each[0] is None] == [each for each in ours.arms if each[0] is None]
    assert {arm for arm, *_ in theirs.arms} == {None, Arm(5, 1, 6)}


def test_settings_change_and_what_was_learned_stays() -> None:
    server = Server(selector(), Random(0))
    for _ in range(200):
        server.step(4)
    before = server.selector.learned()
    server.selector.configure(update("off"))
    server.selector.configure(update("bandit"))
    assert server.selector.learned() == before


def test_noise_switches_little() -> None:
    """Two arms of equal reward, whose steps scatter by 5 %: outside of looks, neither is left for the other often."""
    equal = {DEEP: 7.0, SHALLOW: 7.0, None: 20.0, TREE: 20.0}
    server = Server(Selector(costs(equal), CAPTURED, LARGEST, BUCKETS, Random(0)), Random(0))
    server.selector.configure(update("bandit", exploration=0.0))
    server.random.randint = lambda low, high: min(high, 1)  # type: ignore[method-assign]
    server.slower = {arm: equal[arm] / MS[arm] for arm in MS}
    for _ in range(2000):
        server.step(32)
    arms = [arm for _, arm, _ in server.pulled[200:]]
    assert set(arms) <= {DEEP, SHALLOW}
    assert sum(a != b for a, b in pairwise(arms)) < 10


def test_off_is_left_when_drafts_are_accepted_again() -> None:
    """Off is in force while nothing is accepted, and not for ever."""
    server = Server(selector(), Random(0))
    server.random.randint = lambda low, high: 0  # type: ignore[method-assign]
    for _ in range(1500):
        server.step(32)
    assert [arm for _, arm, _ in server.pulled[-50:]].count(None) > 40
    server.random.randint = lambda low, high: high  # type: ignore[method-assign]
    for _ in range(1000):
        server.step(32)
    assert [arm for _, arm, _ in server.pulled[-50:]].count(DEEP) > 40


def test_an_arm_that_was_not_timed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"arms \(9,1,10\): captured and not timed"):
        Selector(costs(), {Arm(9, 1, 10): 4}, LARGEST, BUCKETS, Random(0))


def test_a_table_crosses_to_other_ranks_in_a_few_bytes() -> None:
    table = selector().table()
    wire = msgspec.msgpack.encode(table)
    assert msgspec.msgpack.decode(wire, type=ArmTable) == table
    assert len(wire) < 64


def test_the_table_changes_only_where_a_decision_does() -> None:
    """So that ranks are sent little: at most two tables for each look, out and back."""
    server = Server(selector(), Random(0))
    tables = []
    for _ in range(1000):
        server.step(32)
        tables.append(server.selector.table())
    changes = sum(a != b for a, b in pairwise(tables))
    looks = sum(arm != SHALLOW for _, arm, _ in server.pulled)
    assert 0 < changes <= 2 * looks + 2


@given(MODES, st.lists(st.sampled_from([1, 3, 4, 12, 64, 0]), max_size=200), st.integers(0, 5))
def test_results_that_wait_are_not_lost(mode: str, batches: list[int], seed: int) -> None:
    """Each counts as soon as anyone asks. 0 is a prefill, before and behind which one step's time does not count; that
    of a step before which the drafter reads does not count either."""
    server = Server(selector(seed), Random(seed))
    server.selector.configure(update(mode))
    for batch in batches:
        if batch == 0:
            server.selector.interrupted()
        else:
            server.step(batch)
    report = server.selector.report()
    settled = sum(batch > 0 for batch in batches) - (server.waiting is not None)
    counted = sum(arm.pulls for bucket in report.buckets for arm in bucket.arms)
    assert (report.lost, report.unmatched) == (0, 0)
    returns = sum(before is None and arm is not None for (_, before, _), (_, arm, _) in pairwise(server.pulled))
    assert settled - 2 * batches.count(0) - returns - 1 <= counted <= settled
    assert server.selector.report() == report


def test_selecting_and_observing_are_quick() -> None:
    """Tens of microseconds on a quiet machine, at the largest batch; the bound is ten times the 50 that are allowed."""
    chains = [Arm(steps, 1, steps + 1) for steps in range(1, 8)]
    timed = costs({None: 5.0} | {arm: 5.0 + arm.num_steps for arm in chains})
    buckets = default_buckets(timed, dict.fromkeys(chains, 256), 256)
    chosen = Selector(timed, dict.fromkeys(chains, 256), 256, buckets, Random(0))
    random, spent = Random(0), ([], [])
    for step in range(2000):
        start = perf_counter()
        arm = chosen.table().arm(256)
        chosen.launched(arm, 256, 100_000, step * 0.01)
        middle = perf_counter()
        accepted = random.choices(range(1 + (arm.num_steps if arm else 0)), k=256)
        after = perf_counter()
        chosen.settled(256, accepted, (step + 1) * 0.01)
        for times, seconds in zip(spent, (middle - start, perf_counter() - after), strict=True):
            times.append(seconds)
    assert chosen.report().unmatched == 0
    selecting, observing = (1e6 * fmean(times) for times in spent)
    print(f"select {selecting:.1f} us, observe {observing:.1f} us")  # noqa: T201 - shown by pytest -s
    assert max(selecting, observing) < 500


def test_default_buckets_hold_what_could_be_best_where_it_was_captured() -> None:
    captured = CAPTURED | {TREE: 20, Arm(7, 1, 8): 128}
    buckets = default_buckets(costs(MS | {Arm(7, 1, 8): 500.0}, sizes=(8, 64)), captured, LARGEST)
    assert [bucket.first for bucket in buckets] == [1, 9, 65]
    assert buckets[2].arms == (None,)
    assert TREE in buckets[0].arms
    assert TREE not in buckets[1].arms
    assert all(None in bucket.arms and Arm(7, 1, 8) not in bucket.arms for bucket in buckets)


@given(st.dictionaries(st.sampled_from([SHALLOW, DEEP, TREE]), st.integers(1, LARGEST)), st.integers(1, LARGEST))
def test_without_timing_an_arm_competes_wherever_it_was_captured(captured: dict[Arm, int], largest: int) -> None:
    buckets = untimed_buckets(captured, largest)
    firsts = [bucket.first for bucket in buckets]
    assert firsts[0] == 1
    assert firsts == sorted(set(firsts))
    for batch in range(1, largest + 1):
        arms = max((bucket for bucket in buckets if bucket.first <= batch), key=lambda bucket: bucket.first).arms
        assert set(arms) <= {None, *(arm for arm, most in captured.items() if most >= batch)}
        assert None in arms
        assert set(arms) >= {arm for arm, most in captured.items() if most >= min(largest, 4 * batch)}


def arms_and_reading(server: Server) -> tuple[list[Choice], float]:
    """Of 5,000 steps, after 500 others: the arms, and the share of the time that the drafter reads."""
    for _ in range(500):
        server.step(16)
    began, read = server.now, server.read
    for _ in range(5000):
        server.step(16)
    return [arm for _, arm, _ in server.pulled[-5000:]], (server.read - read) / (server.now - began)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_look_from_off_pays_for_what_the_drafter_reads_first(seed: int, late: bool) -> None:
    """Its near rival is looked at often, and each time the drafter has what it missed to read."""
    server = Server(selector(seed), Random(seed), {SHALLOW: 1.1, DEEP: 2.0}, reading=0.0003, late=late)
    arms, reading = arms_and_reading(server)
    assert arms.count(None) > 4400, "off is best, by 3 %"
    assert set(arms) > {None}
    assert reading < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_look_at_off_pays_for_what_the_drafter_reads_afterwards(seed: int, late: bool) -> None:
    server = Server(selector(seed), Random(seed), {DEEP: 2.0}, reading=0.004, late=late)
    arms, reading = arms_and_reading(server)
    assert arms.count(SHALLOW) > 4500, "it is best"
    assert None in arms
    assert reading < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_looks_at_off_tell_what_off_takes_though_they_are_settled_late(seed: int) -> None:
    """What follows a look at off waits for the drafter. Off, 7 % slower at first and 7 % faster later, is found."""
    server = Server(selector(seed), Random(seed), {DEEP: 2.0, TREE: 2.0}, reading=0.004, late=True)
    for _ in range(3000):
        server.step(32)
    arms = [arm for _, arm, _ in server.pulled[-1000:]]
    assert arms.count(SHALLOW) > 900
    server.slower[SHALLOW] = 1.15
    for _ in range(3000):
        server.step(32)
    arms = [arm for _, arm, _ in server.pulled[-1000:]]
    assert arms.count(None) > 750


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_look_at_off_with_one_request_keeps_none_from_being_looked_at_with_many(seed: int) -> None:
    """What the drafter reads after it takes a pass, for two tokens or for a hundred; and others have none to read."""
    server = Server(selector(seed), Random(seed), reading=0.01)
    for _ in range(3000):
        server.step(1)
    assert None in [arm for _, arm, _ in server.pulled]
    for _ in range(1000):
        server.step(32)
    arms = [arm for _, arm, _ in server.pulled[-1000:]]
    assert arms.count(DEEP) > 900
    assert arms.count(SHALLOW) >= 4


@pytest.mark.parametrize("seed", range(5))
def test_a_look_does_not_take_what_the_launch_of_the_next_step_takes(seed: int) -> None:
    """An arm whose steps are launched as slowly as they run hides that another, which is better, is quicker."""
    cpu_s = {DEEP: 0.008, SHALLOW: 0.004}
    server = Server(selector(seed), Random(seed), {SHALLOW: 4.4 / MS[SHALLOW], TREE: 2.0}, cpu_s=cpu_s)
    for _ in range(3000):
        server.step(16)
    arms = [arm for _, arm, _ in server.pulled[-1000:]]
    assert arms.count(SHALLOW) > 750, "it makes 1.09 times as much"


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_off_is_left_though_arms_were_slow_when_it_came(seed: int, late: bool) -> None:
    """The machine was disturbed while an arm ran, and not once it was off: looks from off tell what arms take now."""
    server = Server(selector(seed), Random(seed), {SHALLOW: 1.6, DEEP: 1.8, TREE: 1.8}, reading=0.0003, late=late)
    for _ in range(1000):
        server.step(32)
    assert [arm for _, arm, _ in server.pulled[-500:]].count(None) > 400
    server.slower = {}
    for _ in range(3000):
        server.step(32)
    assert [arm for _, arm, _ in server.pulled[-1000:]].count(DEEP) > 850, "it makes 1.25 and 1.5 times as much"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.1, 1.2])
def test_off_is_not_taken_for_faster_because_its_launch_is(factor: float, seed: int) -> None:
    """It makes less than chain 1,1,2 by a tenth or a fifth: it is looked at, and never comes into force."""
    rate = (1 + 0.5) / MS[SHALLOW]
    slower = {None: factor / rate / MS[None], DEEP: 2.2, TREE: 2.2}
    launch_s = dict.fromkeys((SHALLOW, DEEP, TREE), 0.0025) | {None: 0.0005}
    server = Server(selector(seed), Random(seed), slower, launch_s=launch_s)
    for _ in range(4000):
        server.step(32)
    runs = [(arm, len(list(run))) for arm, run in groupby(arm for _, arm, _ in server.pulled[-3000:])]
    looks = [length for arm, length in runs if arm is None]
    assert looks
    assert max(looks) <= 3


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_that_is_padded_does_not_make_its_arm_seem_slow(seed: int) -> None:
    """A draining batch runs by the graph of the next size, again and again: a full one costs no more than it did."""
    batches, random = [*range(128, 64, -4)] * 20, Random(seed)
    timed = StepCosts(
        [Timing(arm, n, 0, n * ms / 32e3) for arm, ms in MS.items() for n in (32, 64, 96, 128)], padded=True
    )
    chosen = Selector(timed, {SHALLOW: 128}, 128, [Bucket(1, (SHALLOW, None))], random)
    now = 0.0
    for batch in [*batches, 128]:
        arm = chosen.table().arm(batch)
        chosen.launched(arm, batch, 0, now)
        now += (128 if batch > 96 else 96) * MS[arm] / 32e3 * random.uniform(0.97, 1.03)
        chosen.settled(batch, [1 if arm else 0] * batch, now)
    found = {None if each.arm is None else SHALLOW: each.step_ms for each in chosen.report().buckets[0].arms}
    assert found == pytest.approx({arm: 4 * MS[arm] for arm in found}, rel=0.03)


@pytest.mark.parametrize("mode", ["pinned", "bandit"])
def test_what_a_step_usually_takes_does_not_follow_a_machine_that_others_disturb(mode: str) -> None:
    """All steps take up to a half longer for some steps, then as before: at the end as at the beginning."""
    server = Server(selector(), Random(0))
    server.selector.configure(schemas.StrategyUpdate(mode=mode, pinned=schemas.Arm(3, 1, 4)))
    ratios = []
    for _ in range(150):
        before = server.selector.step_times()
        for slower in [1.0] * 40 + [1.0 + server.random.random() / 2] * 10:
            server.slower = dict.fromkeys(MS, slower)
            server.step(16)
        after = server.selector.step_times()
        ratios.append((after.decoded_s - before.decoded_s) / (after.usual_s - before.usual_s))
    assert fmean(ratios[-30:]) == pytest.approx(fmean(ratios[:30]), rel=0.05)
