"""What a bench says of what it measured. Its loops run against a real server in tests/server/test_bench.py."""

import re

import msgspec
import pytest
from tlt_client import SamplingParams, schemas

from tlt_server.bench.measure import Measured, Visit
from tlt_server.bench.plan import Plan, counts, present, sides_of
from tlt_server.bench.report import figures_of, recommendation, table
from tlt_server.errors import ConfigError

ARM = schemas.Arm(3, 1, 4)
SPECULATION = schemas.Speculation("bandit", on=True, held=None, arm=ARM, arms=(ARM,))
CAPTURED = schemas.Graphs("pool", 1.0, None, (schemas.CapturedArm(ARM, 4, 8),), (), "")


def visit(rate: float, accepted: tuple[int, ...] = (80, 60, 40)) -> Visit:
    return Visit(2.0, round(2 * rate), 3, 100, accepted)


def measured(off: list[float], bandit: list[float], arm: list[float], load: int = 4) -> Measured:
    rates = {"off": off, "bandit": bandit, "3,1,4": arm}
    visits = {(side, load): [visit(rate) for rate in found] for side, found in rates.items() if found}
    return Measured(sides_of(SPECULATION, arms=True), visits)


def said(found: Measured) -> str:
    return recommendation(found, figures_of(found))


def test_figures_are_medians_and_ratios_round_by_round() -> None:
    found = measured([100, 200, 100], [150, 400, 160], [100, 210, 120])
    figures = figures_of(found)
    assert figures["tokens_per_s_bandit_batch_4"] == 160
    assert [figures[f"speedup_{which}bandit_batch_4"] for which in ("min_", "", "max_")] == [1.5, 1.6, 2.0]
    assert figures["accept_length_3_1_4_batch_4"] == pytest.approx(2.8)
    assert [figures[f"accepted_{depth}_bandit_batch_4"] for depth in (1, 2, 3)] == [0.8, 0.6, 0.4]
    assert not [name for name in figures if "accept" in name and "off" in name]
    assert table(found, figures).row_count == 3


def test_depths_that_some_visits_did_not_reach_count_as_none() -> None:
    found = Measured([], {("bandit", 1): [visit(1, (50,)), visit(1, (70, 20))]})
    assert figures_of(found)["accept_length_bandit_batch_1"] == 1.7


@pytest.mark.parametrize(
    ("bandit", "arm", "words"),
    [
        ([200, 210], [190, 200], "Leave the bandit on: 2.05 at 4 times as fast"),
        ([200, 210], [230, 240], "At 4, 3,1,4 by itself is faster: 2.35"),
        ([90, 95], [80, 80], "does not pay here .*mode off is as good"),
        ([90, 130], [80, 80], "Rounds disagree at 4"),
        ([], [], "Too little was measured"),
    ],
)
def test_recommendation(bandit: list[float], arm: list[float], words: str) -> None:
    assert re.search(words, said(measured([100, 100], bandit, arm)))


def test_an_untrained_drafter_is_named() -> None:
    visits = {("off", 1): [visit(100)], ("bandit", 1): [visit(99, (5, 1))]}
    assert "train the drafter" in said(Measured(sides_of(SPECULATION, arms=False), visits))


def test_an_arm_is_asked_where_it_was_captured_alone() -> None:
    sides = sides_of(msgspec.structs.replace(SPECULATION, graphs=CAPTURED), arms=True)
    plan = Plan(
        url="http://x", prompts=["a"], sampling=SamplingParams(max_new_tokens=9), loads=[4, 8], seconds=2, rounds=3
    )
    assert [(side.name, load) for side, load in plan.turns(sides)] == [
        *((name, 4) for name in ("off", "bandit", "3,1,4")),
        ("off", 8),
        ("bandit", 8),
    ]
    assert "about 35 s" in plan.told(sides)  # five turns of three rounds of 2 s, and of a warm-up of 1 s


def test_a_server_without_a_drafter_is_not_measured() -> None:
    with pytest.raises(ConfigError, match="start it with --drafter"):
        sides_of(schemas.Speculation("off", on=False, held=None, arm=None), arms=True)


@pytest.mark.parametrize("text", ["", "1,", "x", "1 2", "1.5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--concurrency"):
        counts(text)


@pytest.mark.parametrize(("loads", "seconds"), [([0], 5), ([1, 1], 5), ([1], 0.5), ([1], float("nan"))])
def test_numbers_that_cannot_be_are_refused(loads: list[int], seconds: float) -> None:
    with pytest.raises(ConfigError):
        Plan(url="http://x", prompts=["a"], sampling=SamplingParams(), loads=loads, seconds=seconds, rounds=1)


@pytest.mark.parametrize("mode", ["bandit", "paper", "pinned", "off"])
def test_the_strategy_of_before_is_told_whole(mode: str) -> None:
    arm = schemas.ArmReport(ARM, 0, 0.0, None, 1.0, 1.0, 1.0)
    bucket = schemas.BucketReport(1, 8, ARM, (arm,))
    selection = schemas.Selection(
        mode=mode, epsilon=0.2, window=9, exploration=0.1, explored_s=0, explored_lost_s=0, decoded_s=0, lost=0,
        unmatched=0, buckets=(bucket,),
    )  # fmt: skip
    known = schemas.Speculation(mode, on=True, held=None, arm=ARM, arms=(ARM,), selection=selection)
    assert present(known) == schemas.StrategyUpdate(
        mode=mode,
        pinned=ARM if mode == "pinned" else None,
        buckets=(schemas.SelectionBucket(1, (ARM,)),),
        epsilon=0.2,
        window=9,
        exploration=0.1,
    )
