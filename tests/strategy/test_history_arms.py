"""Arms of history beside a drafter's: what they give is foreseen, and their results move nobody else."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tlt_client import schemas

from tests.strategy.kit import DEEP, LARGEST, SHALLOW, costs
from tlt_server.config import Arm, Watchfulness
from tlt_server.engine.weights.watchdog import Watchdog
from tlt_server.strategy.arms import DRAFT_EXTEND, DRAFTING, KEYS, VERIFICATION, ArmTable, Bucket, Choice
from tlt_server.strategy.costs import StepCosts, Timing, from_passes, guessed_costs
from tlt_server.strategy.defaults import default_buckets, worth_having
from tlt_server.strategy.estimates import Estimates
from tlt_server.strategy.graph_budget import estimated
from tlt_server.strategy.selector import Selector
from tlt_server.strategy.settings import faults, from_client, to_client

LONG, SHORT = Arm.history(7), Arm.history(3)
MS: dict[Choice, float] = {None: 5.0, SHALLOW: 7.0, DEEP: 8.0, LONG: 7.0, SHORT: 6.0}
CAPTURED = {SHALLOW: 64, DEEP: 64, LONG: 64, SHORT: 64}


def selector() -> Selector:
    return Selector(costs(MS), CAPTURED, LARGEST, [Bucket(1, (SHALLOW, DEEP, LONG, SHORT, None))], Random(0))


def decode(chosen: Selector, steps: int, batch: int = 8, rate: float = 0.0) -> list[Choice]:
    """The arms of so many steps, whose drafts are accepted at a rate."""
    random, now, arms = Random(3), 0.0, []
    for _ in range(steps):
        arm = chosen.table().arm(batch)
        chosen.launched(arm, batch, 100, now)
        now += MS[arm] / 1000
        depth = arm.num_steps if arm else 0
        chosen.settled(
            batch, [next((k for k in range(depth) if random.random() > rate), depth) for _ in range(batch)], now
        )
        arms.append(arm)
    return arms


@given(st.lists(st.tuples(st.sampled_from([LONG, SHORT]), st.lists(st.integers(0, 7), min_size=1, max_size=8))))
def test_their_results_move_no_drafters_level(steps: list[tuple[Arm, list[int]]]) -> None:
    known = Estimates(costs(MS))
    for _ in range(40):
        known.observe(DEEP, [2, 3, 1, 0], 0.008, 0.008)
    known.learn()
    before = [known.length(arm) for arm in (SHALLOW, DEEP)]
    for arm, accepted in steps:
        known.observe(arm, accepted, 0.007, 0.007)
    known.learn()
    assert [known.length(arm) for arm in (SHALLOW, DEEP)] == before
    assert known.length(LONG) == 1.0, "nothing was foreseen"


def test_what_is_foreseen_is_what_is_chosen_by() -> None:
    """It is left as soon as nobody matches, and taken up as soon as somebody does."""
    chosen = selector()
    chosen.foresee([1.0] * 7)
    assert not {LONG, SHORT} & set(decode(chosen, 400))
    chosen.foresee([1.9, 2.7, 3.4, 4.0, 4.5, 4.9, 5.2])
    assert decode(chosen, 100)[20:].count(LONG) > 70
    chosen.foresee([1.9, 2.4, 2.6, 2.6, 2.6, 2.6, 2.6])
    assert decode(chosen, 100)[20:].count(SHORT) > 70
    chosen.foresee([1.0] * 7)
    assert not {LONG, SHORT} & set(decode(chosen, 100)[20:])


def test_what_is_foreseen_is_not_explored_again_and_again() -> None:
    """Once pulled, an arm of history has told what a step takes; the drafter's are tried again: they may improve."""
    chosen = selector()
    chosen.foresee([1.3, 1.4, 1.5, 1.5, 1.5, 1.5, 1.5])
    arms = decode(chosen, 2000, rate=0.8)
    for arm in (LONG, SHORT):
        assert arms.count(arm) <= 2
    assert arms.count(SHALLOW) > 5


@pytest.mark.parametrize("mode", ["bandit", "paper", "pinned"])
def test_without_the_drafter_they_go_on(mode: str) -> None:
    chosen = selector()
    chosen.configure(schemas.StrategyUpdate(mode, pinned=to_client(DEEP), epsilon=0.5))
    chosen.foresee([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    chosen.let_draft(False)
    arms = set(decode(chosen, 100, rate=0.9))
    assert not {SHALLOW, DEEP} & arms
    assert (LONG in arms) == (mode != "pinned")
    shown = chosen.report().buckets[0]
    assert {each.arm for each in shown.arms} == {*map(to_client, CAPTURED), None}, "who sets it back loses none"
    chosen.let_draft(True)
    assert mode != "pinned" or chosen.table().arm(1) == DEEP
    pinned = schemas.StrategyUpdate("pinned", pinned=to_client(SHORT))
    chosen.configure(pinned)
    chosen.let_draft(False)
    assert chosen.table().arm(1) == SHORT


def test_they_compete_among_themselves_for_a_place() -> None:
    """At any one rate they would beat a drafter's chains, whose rate is another."""
    made = StepCosts(
        Timing(arm, batch, 0, seconds)
        for batch in (1, 64)
        for arm, seconds in {None: 5.0, DEEP: 8.0, Arm.history(3): 5.5, Arm.history(1): 5.4}.items()
    )
    captured = {DEEP: 64, Arm.history(3): 64, Arm.history(1): 64}
    for bucket in default_buckets(made, captured, 64):
        assert DEEP in bucket.arms
        assert Arm.history(3) in bucket.arms
    assert set(worth_having(made, captured, 64)) == {DEEP, Arm.history(3)}


def test_they_share_what_a_chain_of_their_size_has() -> None:
    chain = Arm(7, 1, 8)
    assert KEYS[VERIFICATION](LONG) == KEYS[VERIFICATION](chain)
    assert KEYS[DRAFT_EXTEND](LONG) == KEYS[DRAFT_EXTEND](chain)
    assert KEYS[DRAFTING](LONG) != KEYS[DRAFTING](chain)
    assert estimated({chain: [1, 2], LONG: [1, 2]}, [1, 2], 1e3) == estimated({chain: [1, 2]}, [1, 2], 1e3)


def test_they_cost_no_drafters_passes() -> None:
    of_target, of_drafter = (StepCosts([Timing(None, 1, 0, each), Timing(None, 64, 0, 2 * each)]) for each in (5.0, 1))
    seconds = {each.arm: each.seconds for each in from_passes(of_target, of_drafter, [Arm(7, 1, 8), LONG], [1])}
    assert seconds[Arm(7, 1, 8)] - seconds[LONG] == pytest.approx(6 * of_drafter.seconds(None, 1, 0))
    guessed = guessed_costs([Arm(7, 1, 8), LONG], 8)
    assert guessed.seconds(LONG, 8, 0) < guessed.seconds(Arm(7, 1, 8), 8, 0)


def test_they_cross_the_wire_as_others_do() -> None:
    table = ArmTable((1, 9), (LONG, None))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=ArmTable) == table
    assert msgspec.json.decode(b"[3,1,4]", type=Arm) == DEEP
    assert from_client(to_client(LONG)) == LONG
    assert msgspec.json.encode(to_client(DEEP)) == b'{"num_steps":3,"topk":1,"num_draft_tokens":4}'
    assert [str(to_client(arm)) for arm in (LONG, DEEP)] == ["history:7", "3,1,4"]
    wrong = schemas.StrategyUpdate("pinned", pinned=schemas.Arm(3, 1, 4, "memory"))
    assert faults(wrong, CAPTURED, LARGEST) == ["pinned: source 'memory': one of drafter, history"]
    tree = schemas.StrategyUpdate("pinned", pinned=schemas.Arm(3, 2, 6, "history"))
    assert "is a chain" in faults(tree, CAPTURED, LARGEST)[0]


def test_a_drafter_with_arms_of_history_alone_is_watched_in_none() -> None:
    watch = Watchdog([], Watchfulness.ARMED, 1.2, lambda: 0.0).describe()
    assert (watch.state, watch.steps) == ("gathering", 0)
