"""What the demo makes of its figures."""

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from tlt_server.demo import parts
from tlt_server.demo.parts import as_text
from tlt_server.demo.run import explain, faults
from tlt_server.errors import ConfigError

FIGURES: dict[str, float | int] = {
    "requests": 1520,
    "failed_requests": 0,
    "rollouts": 128,
    "tokens_per_s_plain": 600.0,
    "tokens_per_s_spec": 900.0,
    "accept_length": 3.5,
    "accept_length_ngram": 1.4,
    "accuracy_plain": 0.75,
    "accuracy_spec": 0.70,
    "response_length_p50": 90,
    "response_length_p90": 380.4,
    "response_length_max": 800,
    "sampled_mismatches": 1,
    "greedy_responses": 16,
    "greedy_mismatches": 0,
    "sampling_p_value_plain": 0.5,
    "sampling_p_value": 0.4,
}


def test_a_sound_run_has_no_faults() -> None:
    assert faults(FIGURES) == []


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("failed_requests", 2, "2 of 1520 requests failed"),
        ("greedy_mismatches", 1, "1 greedy responses changed"),
        ("sampled_mismatches", 3, "3 sampled responses changed"),
        ("sampling_p_value", 1e-6, "do not follow the target's law (p = 1.0e-06)"),
    ],
)
def test_every_fault_is_named(figure: str, value: float, said: str) -> None:
    (fault,) = faults(FIGURES | {figure: value})
    assert said in fault


def test_the_table_holds_the_figures() -> None:
    text = as_text(FIGURES)
    for cell in ("600", "900", "3.50", "1.40", "75% ± 4%", "90 / 380 / 800", "0 of 16", "0 of 1520"):
        assert cell in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_it_is_said_whether_speculation_pays_and_why_not() -> None:
    assert "1.50 times as fast" in explain(FIGURES)
    slow = explain(FIGURES | {"tokens_per_s_spec": 300.0})
    assert "costs 7.0 times a plain one" in slow
    assert "0.50 of plain speed" in slow


def test_without_the_packages_of_the_loop_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tlt_grpo" else found(name))
    monkeypatch.setattr(parts.speculation, "run", lambda problems, console: FIGURES)
    console = Console(file=io.StringIO(), record=True, width=200)
    assert parts.run("both", 1, 1, Path("never.png"), console) == (FIGURES, [])
    assert console.export_text().startswith("the loop of RL is left out: it needs tlt_grpo")
    with pytest.raises(ConfigError, match="needs tlt_grpo"):
        parts.run("loop", 1, 1, Path("never.png"), console)
