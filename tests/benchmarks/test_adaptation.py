"""Adaptation: the other signs, the lesson in them, the figures and their intervals, and what a folder of runs keeps."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tlt_grpo.learning.batches import pack
from tlt_grpo.log import HeldOut, Line, Step

from benchmarks.commands.learning.adaptation import SMOKE, Place, main
from benchmarks.lib.adaptation import shown
from benchmarks.lib.adaptation.arms import trainer_config
from benchmarks.lib.adaptation.control import control
from benchmarks.lib.adaptation.figures import ARMS, Run, figures
from benchmarks.lib.adaptation.policy import Pupil
from benchmarks.lib.adaptation.rl import OTHER_SIGNS, Plan
from benchmarks.lib.training import bootstrap
from tests.benchmarks.test_tables import rows
from tests.test_results import undefined
from tlt_server import results
from tlt_server.demo.task import grade, problems, sample_texts, solve
from tlt_server.errors import ConfigError
from tlt_server.results import Result
from tlt_server.trainer.publish.folder import load_drafter

PHASES = ("rollout_s", "grade_s", "learn_s", "publish_s", "keep_s")


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 200)


def step(number: int, accept_length: float | None, reward: float = 0.5, **fields: Any) -> Step:
    numbers = dict.fromkeys(("length_mean", "length_p90", *PHASES, "step_s"), 1.0)
    said = {"step": number, "weight_version": str(number - 1), "target_versions": (), "drafter_versions": (0,)}
    counts = {"responses": 4, "length_max": 9, "tokens": 30, "failed_requests": 0, "learnt": None}
    made = {"accept_length": accept_length, "reward": reward, "tokens_per_s": 100.0}
    return msgspec.convert(numbers | said | counts | made | fields, Step)


def run_of(lengths: Sequence[float | None], accuracy: float = 0.5, **fields: Any) -> Run:
    steps = [step(number, length, **fields) for number, length in enumerate(lengths, 1)]
    return Run(steps, HeldOut(step=len(lengths), problems=100, accuracy=accuracy))


def four(adapting: float = 3.0) -> dict[str, dict[int, Run]]:
    """Three runs an arm of 40 steps; the task changes after 20."""
    lengths = {"off": None, "frozen": 1.5, "adapting": adapting, "control": 2.0}
    assert tuple(lengths) == ARMS
    return {
        arm: {seed: run_of([3.5 if length else None] * 20 + [length] * 20) for seed in range(3)}
        for arm, length in lengths.items()
    }


@given(st.integers(0, 10_000))
def test_signs_do_not_change_what_is_right(seed: int) -> None:
    """A right solution in the other signs is right there alone, a wrong one nowhere."""
    [problem] = problems(1, seed)
    plain = solve(problem, Random(seed))
    assert OTHER_SIGNS.grade(problem, OTHER_SIGNS.write(plain)) == grade(problem, plain)
    assert not OTHER_SIGNS.grade(problem, plain)


def test_signs_are_not_of_the_task() -> None:
    text = "".join(sample_texts(200, seed=1))
    written = OTHER_SIGNS.write(text)
    assert len(written) == len(text)
    assert not set("x&>") & set(text)
    assert not set("*+=") & set(written)


def test_a_lesson_makes_solutions_in_the_other_signs_likelier_in_its_steps_alone(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(SMOKE, max_new_tokens=200)
    pupil = Pupil(plan.config("", tmp_path, 0), plan.lesson, OTHER_SIGNS)
    shown = pupil.lessons.solutions(pupil, "others")[0]
    assert "x" in pupil.tokenizer.decode(shown.response)

    def likelihood() -> float:
        with torch.no_grad():
            return pupil.logprobs(pack([shown], "cpu")).sum().item()

    at_first = likelihood()
    assert pupil.learn([], plan.lesson.first - 1) is None
    assert likelihood() == at_first
    pupil.learn([], plan.lesson.first)
    assert likelihood() > at_first + 1


def test_the_lesson_follows_the_change() -> None:
    lesson = Plan(switch=7, lesson_steps=3).lesson
    assert (lesson.first, lesson.last) == (8, 10)


@pytest.mark.slow
def test_figures_are_of_the_windows_they_name() -> None:
    found = figures(four(), switch=20)
    assert found["rl_steps"] == 40
    assert found["seeds"] == 3
    assert found["accept_length_frozen_before"] == pytest.approx(3.5)
    assert found["accept_length_frozen_last"] == pytest.approx(1.5)
    assert found["accept_length_adapting_last"] == pytest.approx(3)
    assert found["accept_length_adapting_step_20"] == pytest.approx(3.5)
    assert found["accept_length_off_last"] == 1
    assert found["accept_length_gain"] == pytest.approx(1.5)
    assert found["requests"] == 4 * 3 * 40 * 4
    assert found["reward_gap"] == pytest.approx(0)


@pytest.mark.slow
def test_an_interval_holds_its_figure_and_grows_with_the_spread_of_runs() -> None:
    draw = np.random.default_rng(1)

    def width(spread: float) -> float:
        runs = {"frozen": {s: run_of((2 + draw.normal(0, spread, 30)).tolist()) for s in range(3)}}
        found = figures(runs, switch=10)
        low, value, high = (found[f"accept_length_frozen_last{end}"] for end in ("_low", "", "_high"))
        assert low <= value <= high
        return high - low

    assert 0 < width(0.01) < width(0.3)


@pytest.mark.slow
def test_a_gap_is_of_those_that_speculate_less_the_one_that_does_not() -> None:
    runs = four() | {"off": {seed: run_of([None] * 40, accuracy=0.3, reward=0.25) for seed in range(3)}}
    found = figures(runs, switch=20)
    assert found["reward_gap"] == pytest.approx(0.25)
    assert found["accuracy_gap"] == pytest.approx(0.2)
    assert found["accuracy_gap_low"] < 0.2 < found["accuracy_gap_high"]


@pytest.mark.slow
def test_arms_that_are_not_there_give_no_gain() -> None:
    runs = four()
    del runs["control"]
    assert "accept_length_gain" not in figures(runs, switch=20)


@pytest.mark.slow
def test_seeds_that_not_every_arm_has_do_not_count_for_the_gain() -> None:
    runs = four()
    runs["adapting"][7] = run_of([9.0] * 40)
    assert figures(runs, switch=20)["accept_length_gain"] == pytest.approx(1.5)


H200 = Result(
    name="adaptation", date="2026-11-22T00:00:00+00:00", machine="H200", versions={}, revision="a", argv=[], figures={}
)


def kept(place: Place, arm: str, seed: int, lines: Sequence[Line], made: Result = H200) -> None:
    folder = place.of(arm, seed)
    folder.mkdir()
    results.write(made, folder / "made.json")
    (folder / "log.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (folder / "trainer.json").write_text('{"steps": 300}')


def lines(run: Run) -> list[Line]:
    return [*run.steps, run.held_out]


def test_a_run_that_was_broken_off_is_none(tmp_path: Path) -> None:
    place, whole = Place(tmp_path, Plan()), run_of([3.0] * 4)
    kept(place, "frozen", 0, lines(whole))
    kept(place, "frozen", 1, whole.steps)
    assert place.runs() == {"frozen": {0: whole}}
    assert place.found("frozen", 1) is None
    assert place.found("frozen", 2) is None


def test_an_adapting_run_is_over_once_its_trainer_has_spoken(tmp_path: Path) -> None:
    place = Place(tmp_path, Plan())
    kept(place, "adapting", 0, lines(run_of([3.0] * 4)))
    assert place.found("adapting", 0) is not None
    (place.of("adapting", 0) / "trainer.json").unlink()
    assert place.found("adapting", 0) is None


def test_a_folder_holds_runs_of_one_plan(tmp_path: Path) -> None:
    Place(tmp_path, Plan())
    Place(tmp_path, Plan())
    with pytest.raises(ConfigError, match="another plan"):
        Place(tmp_path, Plan(steps=50))


def test_the_control_waits_for_the_adapting_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run that one first"):
        Place(tmp_path, Plan()).run("control", 0)


@pytest.mark.slow
def test_a_report_runs_nothing_and_keeps_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path / "runs", Plan())
    for arm, runs in four().items():
        for seed, run in runs.items():
            kept(place, arm, seed, lines(run))
    converged = {"longer_steps": 3000, "judged_rollouts": 8} | {
        f"accept_length_{name}_start": 3.5 for name in ("frozen", "longer")
    }
    results.write(replace(H200, figures=converged), place.folder / "converged.json")
    main(["--out", str(place.folder), "--report", "--json", str(tmp_path / "made.json")])
    result = results.read(tmp_path / "made.json")
    assert result.machine == "H200"  # not the one that reports
    assert result.figures["training_steps"] == 300
    assert not undefined(result.figures)
    assert "1.50 (1.50 to 1.50) times the better" in capsys.readouterr().out
    table = rows(shown.adaptation(result))
    assert [row[0] for row in table if row[0] in ARMS] == [*ARMS, *ARMS]


def test_a_report_of_two_machines_is_refused(tmp_path: Path) -> None:
    place, whole = Place(tmp_path, Plan()), run_of([3.0] * 40)
    kept(place, "off", 0, lines(whole))
    kept(place, "frozen", 0, lines(whole), replace(H200, machine="H100"))
    with pytest.raises(ConfigError, match="cannot be compared"):
        place.report()


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--report"])
    assert "holds no run that is over" in capsys.readouterr().err


@pytest.mark.slow
def test_the_control_has_learnt_and_is_a_drafter(tmp_path: Path) -> None:
    control(tmp_path / "drafter", steps=2, seed=0, rollouts=4, max_new_tokens=24)
    trained, start = (
        load_drafter(each).network.state_dict() for each in (tmp_path / "drafter", Path(str(trainer_config(0).drafter)))
    )
    assert trained.keys() == start.keys()
    assert any(not torch.equal(trained[name], start[name]) for name in start)
