"""Our trainer beside SpecForge's recipe: the schedule, and what is shown of the figures."""

from pathlib import Path

import pytest

from benchmarks.commands.learning.recipes import CPU_PLAN, SIDES, figures, main, shown
from benchmarks.lib.training.recipe import RATE, rate
from tests.definitions import undefined
from tlt_server import results
from tlt_server.results import measured_here


@pytest.mark.parametrize("steps", [20, 200, 1000])
def test_the_rate_rises_within_its_share_of_the_steps_and_falls_to_nothing(steps: int) -> None:
    rates = [rate(step, steps) for step in range(steps)]
    top = rates.index(max(rates))
    assert top in (max(0, int(0.015 * steps) - 1), int(0.015 * steps))
    assert max(rates) == pytest.approx(RATE)
    assert sorted(rates[:top]) == rates[:top]
    assert sorted(rates[top:], reverse=True) == rates[top:]
    assert 0 < rates[-1] < 0.01 * RATE
    assert rate(steps // 2, steps, 10 * RATE) == pytest.approx(10 * rates[steps // 2])


def test_ours_is_held_against_each_seed_by_seed() -> None:
    found = {"ours": {0: 2.0, 1: 3.0}, "recipe": {0: 1.0, 1: 2.0}, "code": {0: 1.0, 1: 3.0}}
    made = figures(CPU_PLAN, found)
    assert (made["ours_over_recipe_min"], made["ours_over_code_min"]) == (1.5, 1.0)
    assert not undefined(made)
    text = shown(measured_here("recipes", ["x"], made))
    assert f"| {SIDES['code']} | 0.0001 | 2.000 (1.000 to 3.000) | 1.000 |" in text
    assert SIDES["recipe_fast"] not in text


@pytest.mark.slow
def test_the_command_trains_each_without_specforge_too(tmp_path: Path) -> None:
    main(["--smoke", "--json", str(tmp_path / "x.json")])
    made = results.read(tmp_path / "x.json").figures
    assert made["seeds"] == 1
    assert made["expected_accept_length_recipe_fast"] >= 1
    assert "expected_accept_length_code" not in made


def test_a_folder_without_specforge_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--smoke", "--specforge", str(tmp_path)])
    assert f"--specforge {tmp_path}: no folder specforge in it" in capsys.readouterr().err
