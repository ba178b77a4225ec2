"""Whole steps: the figures of runs that are made up, replays of known speeds, and the padded policy's updates."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tlt_grpo.learning.batches import Trajectory, pack
from tlt_grpo.learning.policy import Learnt
from tlt_grpo.log import Step

from benchmarks.lib.adaptation.policy import Lesson
from benchmarks.lib.draining import DecodeStep
from benchmarks.lib.step import shown
from benchmarks.lib.step.figures import of_run, replayed, requests, summary
from benchmarks.lib.step.plan import (
    AGAIN,
    ARMS,
    FROZEN,
    MUTED,
    OFF,
    ON_POLICY,
    ONLINE,
    PLAIN,
    SMOKE,
    STATIC,
    changing,
    rotated,
    what,
)
from benchmarks.lib.step.policy import Learner, PaddedLearner, divergence, laws, learner
from benchmarks.lib.step.replay import Replay, Rest
from benchmarks.lib.step.running import Kept, Run, Taken
from benchmarks.lib.step.same import Against
from benchmarks.lib.step.serving import kinds
from benchmarks.models.shapes import Shape, build
from tests.definitions import undefined
from tlt_server import results
from tlt_server.config import Arm
from tlt_server.demo import default_paths
from tlt_server.demo.task import sample_texts
from tlt_server.errors import ServerFailed

TARGET = default_paths()[0]
PLAN = replace(SMOKE, steps=6, uncounted=2, prompts=2, group=2, replayed=(4,))
SIZES = (1, 2, 4, 8)
CHAIN = Arm(3, 1, 4)
LARGE = Shape(bias=True, vocab=300, hidden=320, layers=6, heads=8, kv_heads=2, mlp=800, context=2_048)
# off: 100 tokens/s a request at any size; the chain 200
KNOWN = [
    DecodeStep(arm, batch, batch * tokens, tokens / rate)
    for batch in SIZES
    for arm, tokens, rate in ((None, 1, 100), (CHAIN, 3, 200))
    for _ in range(5)
]


def learnt(tokens: int = 100, passes_s: float = 1.0) -> Learnt:
    return Learnt(1e-3, 0.0, 0.0, 0.0, 0.5, None, tokens, passes_s, 0.25)


def taken(number: int, rollout_s: float, lengths: Sequence[int] = (101, 51, 21, 11), **said: Any) -> Taken:
    """A step whose phases take rollout_s + 2 s, and 1 % more between them."""
    phases = {"rollout_s": rollout_s, "grade_s": 0.0, "learn_s": 1.5, "publish_s": 0.5, "keep_s": 0.0}
    whole = 1.01 * sum(phases.values())
    step = Step(
        step=number, weight_version="", target_versions=(), drafter_versions=(1,), responses=4, length_mean=46.0,
        length_p90=86.0, length_max=101, tokens=sum(lengths), tokens_per_s=sum(lengths) / rollout_s, step_s=whole,
        failed_requests=0, lengths=tuple(lengths), drafter_steps=5,
        **{"reward": 0.5, "accept_length": None, "learnt": learnt(), **phases, **said},
    )  # fmt: skip
    return Taken(step, whole, ["a", "b", "c", "d"], [0.99], 0.125, 0.0)


def runs(rollouts: dict[str, float], rewards: Sequence[float] = (0.5,) * 6) -> dict[str, Run]:
    """The first two steps take ten times as long, and do not count."""
    return {
        arm: Run(arm, [taken(i + 1, s * (10 if i < 2 else 1), reward=rewards[i]) for i in range(6)])
        for arm, s in rollouts.items()
    }


@pytest.fixture(scope="module")
def embedded() -> Learner:
    return learner(PLAN.config(TARGET, 128, 0), None, TARGET)


def test_speedups_are_of_whole_steps_and_all_seeds(embedded: Learner) -> None:
    figures: dict[str, float] = {}
    for seed, frozen in enumerate((1.0, 2.0, 4.0)):
        rollouts = {OFF: 6.0, FROZEN: frozen, ONLINE: 3.0, MUTED: 3.5, STATIC: 2.0, PLAIN: 5.0}
        for run in runs(rollouts).values():
            figures |= of_run(run, PLAN, embedded, f"2x2_seed_{seed}")
    found = summary(figures)
    assert [found[f"step_speedup{which}_2x2"] for which in ("", "_min", "_max")] == pytest.approx([8 / 4, 8 / 6, 8 / 3])
    assert found["step_speedup_online_2x2"] == pytest.approx(8 / 5)
    assert found["muted_over_frozen_2x2"] == pytest.approx(5.5 / 4)
    assert found["off_ratio_to_plain_2x2"] == pytest.approx(7 / 8)
    assert found["bubble_max"] == pytest.approx(0.01 / 1.01)
    assert figures["rollout_share_off_2x2_seed_0"] == pytest.approx(6 / 8.08)
    assert figures["counted_steps_off_2x2_seed_0"] == 4
    assert figures["step_min_s_off_2x2_seed_0"] == pytest.approx(8.08)
    assert figures["packs_online_2x2_seed_0"] == 4 * 5
    assert figures["throughput_off_2x2_seed_0"] == pytest.approx(184 / 8.08)
    assert not undefined(figures | found)


def test_arms_are_compared_over_the_steps_that_both_took(embedded: Learner) -> None:
    took = runs({OFF: 6.0, PLAIN: 5.0})
    took[OFF].steps[4:] = [taken(number, 60.0) for number in (5, 6)]  # as their responses are longer
    brief = Run(PLAIN, took[PLAIN].steps[:4])
    figures = of_run(took[OFF], PLAN, embedded, "2x2_seed_0") | of_run(brief, PLAN, embedded, "2x2_seed_0")
    assert summary(figures)["off_ratio_to_plain_2x2"] == pytest.approx(7 / 8)


def test_the_rate_of_updates_is_of_the_passes_alone(embedded: Learner) -> None:
    """6 operations for each parameter that a token is multiplied with; the self-checks' time is none of theirs."""
    figures = of_run(runs({OFF: 1.0})[OFF], PLAN, embedded, "2x2_seed_0")
    by_hand = sum(each.numel() for name, each in embedded.weights().items() if "embed_tokens" not in name)
    assert embedded.multiplied == by_hand
    assert figures["update_tflops_off_2x2_seed_0"] == pytest.approx(6 * by_hand * 100 / 0.875 / 1e12)
    assert figures["check_s_off_2x2_seed_0"] == 0.125


def test_rewards_are_paired_by_step(embedded: Learner) -> None:
    """A gap that is the same in every step is many errors; one that averages out is none."""
    differs, same = (0.5, 0.6, 0.4, 0.6, 0.4, 0.5), (0.31, 0.3, 0.3, 0.31, 0.3, 0.3)
    for rewards, least, most in ((differs, 0, 0.01), (same, 30, 1e9)):
        figures = of_run(runs({OFF: 1.0})[OFF], PLAN, embedded, "2x2_seed_0")
        figures |= of_run(runs({FROZEN: 1.0}, rewards)[FROZEN], PLAN, embedded, "2x2_seed_0")
        assert least <= summary(figures)["reward_gap_in_errors_2x2"] <= most


def test_nothing_is_claimed_of_arms_that_were_not_run(embedded: Learner) -> None:
    found = summary(of_run(runs({FROZEN: 1.0})[FROZEN], PLAN, embedded, "2x2_seed_0"))
    assert not [name for name in found if "speedup" in name or "gap" in name]


@given(st.floats(0.5, 5), st.floats(0, 9), st.lists(st.integers(10, 5000), min_size=2, max_size=9))
def test_what_a_token_takes_is_found(token_ms: float, fixed_s: float, tokens: list[int]) -> None:
    steps = []
    for number, each in enumerate(tokens):
        passes_s = each * token_ms / 1000
        one = taken(number, 1.0, learnt=learnt(each, passes_s))
        one.whole_s = 1.0 + passes_s + fixed_s
        steps.append(one)
    rest = Rest.of(steps)
    assert rest.token_s == pytest.approx(token_ms / 1000)
    assert rest.seconds(7000) == pytest.approx(7 * token_ms + fixed_s, abs=1e-6)


def consistent() -> dict[str, Run]:
    """Rollouts that take what KNOWN says, the bandit's a tenth more: the longest response has 100 tokens to go."""
    return runs({OFF: 1.0, FROZEN: 0.55})


def test_a_replay_says_how_far_it_is_off() -> None:
    replay = Replay(KNOWN, SIZES, consistent(), PLAN.uncounted)
    assert replay.ratios == {OFF: pytest.approx(1.0), FROZEN: pytest.approx(1.1)}
    assert replay.drain(OFF, [100, 50, 20, 10]) == pytest.approx(1.0)
    assert replay.drain(FROZEN, [200]) == pytest.approx(1.1)


def test_larger_steps_learn_longer_and_drain_as_long() -> None:
    """Groups of four responses are drawn, of which each pair has its longest: so rollouts stay, and passes double."""
    replay, found = Replay(KNOWN, SIZES, consistent(), PLAN.uncounted), {}
    for prompts in (2, 400):
        times = replay.steps(OFF, prompts, 2)
        found[prompts] = sum(times) / len(times)
    read = replay.rest.token_s * 100 / 180  # s for each token of a response
    assert found[400] == pytest.approx(1.0 + replay.rest.fixed_s + read * 400 / 2 * 180, rel=0.02)
    assert found[2] < found[400]


@given(st.floats(1.1, 8), st.floats(1.0, 2.0))
def test_longer_accept_lengths_are_never_slower(accept_length: float, factor: float) -> None:
    replay = Replay(KNOWN, SIZES, consistent(), PLAN.uncounted)
    assert replay.speedup_at(accept_length) <= replay.speedup_at(accept_length * factor) + 1e-9
    assert replay.speedup_at(3) == pytest.approx((1.0 + 2.03) / (0.55 + 2.03), rel=0.01)


def test_replayed_figures_are_defined_and_shown(embedded: Learner) -> None:
    found = consistent()
    figures = requests(found.values())
    for run in found.values():
        figures |= of_run(run, PLAN, embedded, "2x2_seed_0")
    figures |= replayed(Replay(KNOWN, SIZES, found, PLAN.uncounted), PLAN, "2x2_seed_0")
    assert figures["step_speedup_replayed_4x2_from_2x2_seed_0"] > 1
    assert not undefined(figures)
    table = shown.table(results.measured_here("step", ["python"], figures | summary(figures)))
    assert "| frozen |" in table
    assert "replayed 4x2" in table


def test_arms_that_train_a_drafter_have_a_server_each() -> None:
    assert kinds(ARMS) == [[OFF, STATIC, FROZEN, AGAIN], [ONLINE], [MUTED], [PLAIN]]
    assert kinds([ONLINE, OFF]) == [[OFF], [ONLINE]]
    assert {tuple(sorted(rotated(ARMS, seed))) for seed in range(9)} == {tuple(sorted(ARMS))}
    assert len({rotated(ARMS, seed)[0] for seed in range(len(ARMS))}) == len(ARMS)
    assert (what(PLAN, "demo"), what(PLAN, "long")) == ("2x2", "2x2_long")


def solutions(one: Learner, number: int = 4) -> list[Trajectory]:
    """As if the policy had sampled them; every other one is better than the mean."""
    made = []
    for i, text in enumerate(sample_texts(number, seed=3)):
        prompt, response = (one.tokens(part) for part in text.split("\n", 1))
        each = Trajectory(prompt, response[:60], (0.0,) * len(response[:60]), 1.0 if i % 2 else -1.0)
        with torch.no_grad():
            made.append(each._replace(logprobs=tuple(one.logprobs(pack([each], "cpu")).tolist())))
    return made


@pytest.mark.slow
def test_a_padded_policy_learns_what_the_embedded_one_learns(embedded: Learner, tmp_path: Path) -> None:
    """And begins anew as it was. Rounding of the real model moves its log-probabilities by 1e-4 (models/padding.py)."""
    embedded.begin()
    built = build(LARGE, tmp_path / "models", dtype=torch.float32, device="cpu")
    padded = learner(PLAN.config(built.target, 128, 0), LARGE, TARGET)
    assert isinstance(padded, PaddedLearner)
    first = {name: each.clone() for name, each in padded.weights().items()}
    some, sequences = solutions(embedded), [embedded.tokens(text) for text in sample_texts(3, seed=5)]
    before = laws(embedded.model, sequences)
    for step in range(3):
        assert all(one.learn(some, step) is not None for one in (embedded, padded))
        assert padded.checked() == [pytest.approx(1, abs=1e-4)]
    moved, apart = (
        divergence(laws(embedded.model, sequences), other) for other in (before, laws(padded.small, sequences))
    )
    assert moved > 1e-4
    assert apart < moved / 1000
    whole = [law[:, : before[0].shape[1]] for law in laws(padded.model, sequences)]
    assert max((a - b).abs().max().item() for a, b in zip(whole, laws(padded.small, sequences), strict=True)) < 1e-3
    padded.begin()
    assert all(torch.equal(first[name], each) for name, each in padded.weights().items())
    embedded.begin()


def test_after_a_change_only_what_comes_behind_the_lesson_counts(embedded: Learner) -> None:
    plan = changing(PLAN)
    assert plan.lesson is not None
    assert (plan.lesson.first, plan.lesson.last, plan.uncounted, plan.steps) == (11, 20, 20, 30)
    end, figures = what(plan, "demo"), {}
    for run in runs({OFF: 4.0, FROZEN: 3.0, ONLINE: 2.0}).values():
        figures |= of_run(run, replace(plan, uncounted=2), embedded, f"{end}_seed_0")
    found = summary(figures)
    assert found["online_over_frozen_after_change_2x2"] == pytest.approx(5 / 4)
    assert not undefined(figures | found)


@pytest.mark.slow
def test_a_lesson_is_the_same_for_the_padded_policy(embedded: Learner, tmp_path: Path) -> None:
    """Given to the small model, and in force in what is published."""
    built = build(LARGE, tmp_path / "models", dtype=torch.float32, device="cpu")
    padded = learner(PLAN.config(built.target, 128, 0), LARGE, TARGET)
    lesson = Lesson(first=2, last=2, updates=2, rate=1e-3, solutions=4)
    sequences = [embedded.tokens(text) for text in sample_texts(2, seed=5)]
    first = laws(embedded.small, sequences)
    for one in (embedded, padded):
        one.begin(lesson)
        assert one.learn([], 1) is None
        assert divergence(first, laws(one.small, sequences)) < 1e-9
        one.learn([], 2)
    taught = laws(embedded.small, sequences)
    assert divergence(first, taught) > 1e-3
    whole = [law[:, : first[0].shape[1]] for law in laws(padded.model, sequences)]
    assert divergence(taught, whole) < 1e-5
    assert padded.checked() == []
    embedded.begin()


@pytest.mark.slow
def test_a_padded_policy_whose_padding_has_changed_ends_the_run(tmp_path: Path) -> None:
    built = build(LARGE, tmp_path / "models", dtype=torch.float32, device="cpu")
    padded = learner(PLAN.config(built.target, 128, 0), LARGE, TARGET)
    padded.learn(solutions(padded, 2), 0)
    with torch.no_grad():
        padded.model.lm_head.weight[-1, -1] += 1
    with pytest.raises(ServerFailed, match=r"padding of lm_head\.weight has changed"):
        padded.checked()


@pytest.mark.slow
def test_a_gradient_may_be_rounded_once_and_not_time_and_again(tmp_path: Path) -> None:
    built = build(LARGE, tmp_path / "models", dtype=torch.float32, device="cpu")
    padded = learner(PLAN.config(built.target, 128, 0), LARGE, TARGET)
    padded.learn(solutions(padded, 2), 0)
    assert len(padded.checked()) == 1
    assert len(padded.checked()) == 1
    padded.optimiser.cosine = 0.7
    assert padded.checked() == [0.7]
    with pytest.raises(ServerFailed, match="in the median of 4 updates"):
        padded.checked()
    for wrong in (0.7, -0.1, math.nan, None):
        padded.begin()
        padded.optimiser.cosine = wrong
        with pytest.raises(ServerFailed, match="has cosine"):
            padded.checked()


@pytest.mark.slow
def test_policies_are_compared_with_off_after_the_same_steps(embedded: Learner, tmp_path: Path) -> None:
    found = consistent()
    now = {name: each.clone() for name, each in embedded.weights().items()}
    other = {name: each + 0.01 * (each.dim() > 1) for name, each in now.items()}
    found[OFF].policies, found[FROZEN].policies = {1: now, 2: now}, {1: now, 2: other}
    found[FROZEN].steps[0].texts = ["a", "b", "x", "d"]
    found[AGAIN] = Run(AGAIN, found[OFF].steps, policies={2: other})
    sequences = [embedded.tokens("3*4: 3*4=12 so 12")]
    against = Against(Kept(tmp_path / "policies"), embedded, sequences, "2x2_seed_0")
    assert not against.figures(found[FROZEN]), "nothing is there to hold it against"
    figures = against.figures(found[OFF])
    assert figures["first_step_differing_frozen_2x2_seed_0"] == 1
    assert figures["divergence_frozen_2x2_seed_0_step_1"] == 0
    assert figures["divergence_frozen_2x2_seed_0_step_2"] > 0.001
    later = Against(Kept(tmp_path / "policies"), embedded, sequences, "2x2_seed_0")  # another command
    figures |= later.figures(found[AGAIN])
    embedded.begin()
    assert figures["divergence_again_2x2_seed_0_step_2"] == figures["divergence_frozen_2x2_seed_0_step_2"]
    assert summary(of_run(found[OFF], PLAN, embedded, "2x2_seed_0") | figures)["divergence_over_again_2x2"] == 1
    assert Kept(tmp_path / "policies").find(OFF, "2x2_seed_1") is Kept(None).find(OFF, "2x2_seed_0") is None
    assert not undefined(figures)


def test_held_out_problems_are_counted_over_all_seeds(embedded: Learner) -> None:
    figures: dict[str, float] = {}
    for seed in range(2):
        for arm, right in ((OFF, 50), (FROZEN, 50 + 10 * seed), (MUTED, 50)):
            run = runs({arm: 1.0})[arm]
            run.held_out = [True] * right + [False] * (100 - right)
            figures |= of_run(run, PLAN, embedded, f"2x2_seed_{seed}")
    assert figures["accuracy_frozen_2x2_seed_1"] == 0.6
    error = (2 * 0.525 * 0.475 / 200) ** 0.5
    assert summary(figures)["accuracy_gap_in_errors_2x2"] == pytest.approx(0.05 / error)
    assert not undefined(figures | summary(figures))


def test_rollouts_in_flight_stand_beside_those_on_policy(embedded: Learner) -> None:
    """By tokens a second of whole steps, for steps that take what ends first are not of the same tokens."""
    figures: dict[str, float] = {}
    for mode, rollouts in ((ON_POLICY, {OFF: 6.0, FROZEN: 2.0}), ("partial", {OFF: 2.0, FROZEN: 1.0})):
        for run in runs(rollouts).values():
            run.mode = mode
            for each in run.steps:
                each.step = replace(each.step, age_mean=1.5 * (mode != ON_POLICY), age_max=3)
            figures |= of_run(run, PLAN, embedded, f"{what(PLAN, 'demo', mode)}_seed_0")
    found = summary(figures)
    assert found["over_on_policy_off_2x2_partial"] == pytest.approx(2)
    assert found["over_on_policy_frozen_2x2_partial"] == pytest.approx(4 / 3)
    assert found["step_speedup_2x2_partial"] == pytest.approx(4 / 3)
    assert figures["age_mean_frozen_2x2_partial_seed_0"] == 1.5
    assert "tokens_per_s_off_2x2_partial_seed_0" not in figures
    assert not undefined(figures | found)
    table = shown.table(results.measured_here("step", ["python"], figures | found))
    assert "| partial | 45.54 | 60.73 | 1.33 | 1.50 | 1.50 |" in table


def test_off_and_frozen_alone_take_steps_in_other_modes() -> None:
    plan = replace(PLAN, modes=(ON_POLICY, "partial"))
    taken = list(plan.runs([OFF, STATIC, FROZEN, AGAIN], seed=1))
    assert taken[0] == (ON_POLICY, STATIC)
    assert sorted(taken[4:]) == [("partial", FROZEN), ("partial", OFF)]
    assert list(plan.runs([ONLINE], seed=0)) == [(ON_POLICY, ONLINE)]
