"""The benchmark of history on servers: its figures are defined and shown."""

from types import SimpleNamespace as Made
from typing import Any

import pytest
from tlt_client.rollouts import SpecCounts

from benchmarks.commands.speed.siblings import EPOCHS, SIDES, as_table, passes
from tests.definitions import undefined
from tlt_server.results import Figures, measured_here


def rollout(verify_calls: int, accepted: int) -> Any:
    return Made(spec=SpecCounts(verify_calls, accepted, 7 * verify_calls) if verify_calls else None)


def test_tokens_of_a_pass_are_of_those_over_drafts() -> None:
    assert passes([rollout(0, 0)]) == 1
    assert passes([rollout(2, 6), rollout(0, 0), rollout(2, 0)]) == pytest.approx(2.5)


def test_figures_are_defined_and_shown() -> None:
    figures: Figures = {"prompts": 8, "responses": 128}
    for side in SIDES:
        for name in EPOCHS:
            figures |= {f"{name}_tokens_a_pass_{side.name}": 2, f"{name}_differ_{side.name}": 1}
    assert not undefined(figures)
    shown = as_table(measured_here("siblings", ["python"], figures))
    assert "differ, of 256" in shown
    assert shown.count("| 2.00 | 2.00 | 2 |") == len(SIDES) - 1
