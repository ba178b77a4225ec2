"""Online against offline: the same traffic gives the same features and the same split; figures and what is shown."""

import dataclasses
from pathlib import Path
from random import Random
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tlt_client import FinishReason, Rollout

from benchmarks.commands.learning.online import Kept, report, runs
from benchmarks.lib.online import shown
from benchmarks.lib.online.figures import Run, figures
from benchmarks.lib.online.live import Counts, Sampled, accept_length, newest
from benchmarks.lib.online.offline import features, group_of, learn
from benchmarks.lib.online.plan import CPU, GPU, SMOKE, Plan, config
from benchmarks.lib.training.learner import states
from tests.benchmarks.test_tables import rows
from tests.test_results import undefined
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import solve, training_problems
from tlt_server.engine.features.tap import group_of as named_by_a_server
from tlt_server.errors import ConfigError
from tlt_server.trainer.publish.folder import load_drafter


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(default_paths()[0])


def sampled(reference: Reference, problems: int, length: int = 40) -> list[Sampled]:
    """Worked solutions, as if they had been sampled, cut."""
    found = []
    for number, problem in enumerate(training_problems(problems, 0)):
        response = reference.tokens(solve(problem, Random(number)))[:length]
        rollout = Rollout(
            rid=str(number), tokens=response, text="", logprobs=None, finish_reason=FinishReason("length"),
            prompt_tokens=0, completion_tokens=len(response),
        )  # fmt: skip
        found.append(Sampled(reference.tokens(problem.prompt), rollout))
    return found


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_offline_holds_out_the_prompts_that_online_does(prompt: list[int]) -> None:
    assert group_of(tuple(prompt)) == named_by_a_server(SimpleNamespace(origin_input_ids=prompt))


def test_features_are_those_that_a_server_sends(reference: Reference) -> None:
    """tests/server/test_features.py holds a server's to the same reference."""
    [one] = sampled(reference, 1)
    [feature] = features([one], torch.device("cpu"))
    wanted = [*one.prompt, *one.rollout.tokens]
    assert feature.tokens.tolist() == wanted[:-1]
    assert (feature.first, feature.prompt, feature.target_version) == (0, len(one.prompt), 0)
    torch.testing.assert_close(feature.states, states(reference.model, wanted[:-1])[0], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("plan", [CPU, GPU])
def test_offline_may_learn_longer(plan: Plan) -> None:
    assert plan.offline_passes >= 2 * plan.passes


@pytest.mark.slow
def test_the_best_drafter_on_the_way_is_kept(reference: Reference, tmp_path: Path) -> None:
    settings = config(SMOKE, 0, tmp_path / "offline")
    best = learn(settings, sampled(reference, 40), 25 * SMOKE.entries, tmp_path / "best")
    assert best.of == 25
    assert best.steps in (20, 25)
    assert best.expected > 1
    start, learnt = (load_drafter(each).network.state_dict() for each in (tmp_path / "offline/start", best.folder))
    assert any(not torch.equal(learnt[name], start[name]) for name in start)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1))
def test_an_accept_length_is_of_all_passes(counted: list[tuple[int, int]]) -> None:
    counts = [Counts(passes, passes * more) for passes, more in counted]
    lengths = [1 + more for _, more in counted]
    assert min(lengths) <= accept_length(counts) <= max(lengths)


def run_of(online: float, offline: float = 3.0) -> Run:
    lengths = {"online": online, "offline": offline, "embedded": 3.5}
    judged = {arm: [Counts(100, round(100 * (length - 1)))] * 8 for arm, length in lengths.items()}
    names = ("responses", "tokens", "tokens_received", "judged_responses", "drafters_online")
    names += tuple(f"{what}_{arm}" for what in ("passes", "steps", "learnt") for arm in ("online", "offline"))
    changed = [(online - 0.5, 0), (online - 0.1, 30), (online, 60)]
    return Run(judged, [1.0, 2.0, online], changed, dict.fromkeys(names, 7.0) | {"rounds": 3})


def kept_on(machine: str, online: float) -> Kept:
    made = msgspec.structs.replace(results.measured_here("online", [], {}), machine=machine)
    return Kept(CPU, run_of(online), made)


def test_a_seed_that_is_over_is_not_run_again(tmp_path: Path) -> None:
    kept = kept_on("here", 2.5)
    (tmp_path / "seed-4.json").write_bytes(msgspec.json.encode(kept))
    assert runs(tmp_path, CPU, [4], []) == {4: kept}
    with pytest.raises(ConfigError, match="another plan"):
        runs(tmp_path, SMOKE, [4], [])


@pytest.mark.slow
def test_a_report_is_of_the_machine_that_ran() -> None:
    made = report({0: kept_on("there", 2.7), 1: kept_on("there", 2.4)})
    assert made.machine == "there"
    assert made.figures["accept_length_online"] == pytest.approx(2.55)
    with pytest.raises(ConfigError, match="cannot be compared"):
        report({0: kept_on("there", 2.7), 1: kept_on("here", 2.4)})


def test_the_newest_drafter_of_a_trainer_is_the_last_published_or_the_first(tmp_path: Path) -> None:
    assert newest(tmp_path) == tmp_path / "start"
    for version in (9, 31, 101):
        (tmp_path / "published" / f"drafter-{version:08}").mkdir(parents=True)
    assert newest(tmp_path).name == "drafter-00000101"


def test_a_run_that_was_never_back_says_so() -> None:
    run = dataclasses.replace(run_of(2.7), changed=[(2.0, 0), (2.5, 20)])
    assert run.recovery_steps is None
    assert dataclasses.replace(run, changed=[(2.6, 0)]).recovery_steps == 0


@pytest.mark.slow
def test_figures_are_of_all_seeds_and_defined() -> None:
    found = figures({0: run_of(2.7), 1: run_of(2.4)})
    assert found["accept_length_online"] == pytest.approx(2.55)
    assert found["online_over_offline_accept_length"] == pytest.approx(0.85)
    assert found["online_over_offline_accept_length_low"] == pytest.approx(0.8)
    assert found["online_over_offline_accept_length_high"] == pytest.approx(0.9)
    assert found["online_over_offline_accept_length_seed_1"] == pytest.approx(0.8)
    assert found["accept_length_online_round_3"] == pytest.approx(2.55)
    assert found["accept_length_changed_round_1"] == pytest.approx(2.05)
    assert (found["recovered"], found["recovery_steps"]) == (2, 30)
    assert not undefined(found)
    table = rows(shown.online(results.measured_here("online", [], found)))
    assert [row[1] for row in table if row[0].startswith("online")] == ["2.55 (2.40 to 2.70)"]
