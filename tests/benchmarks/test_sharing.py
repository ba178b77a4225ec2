"""What `benchmarks sharing` shows of its figures, and which of them are the worst."""

import pytest

from benchmarks.commands.learning.sharing import main, table, worst
from tlt_server.results import Figures, measured_here

FIGURES: Figures = {
    f"{name}_batch_{size}_budget_{budget}": value * size * budget / 100
    for size in (1, 32)
    for budget in (3, 10)
    for name, value in {
        "slowdown": 0.02,
        "slowdown_min": 0.01,
        "slowdown_max": 0.03,
        "slowdown_said": 0.02,
        "trained_tokens_s": 50_000.0,
    }.items()
} | {f"trained_tokens_s_alone_budget_{budget}": 60_000.0 for budget in (3, 10)}


def test_the_worst_is_of_all_batches_at_the_smallest_budget() -> None:
    assert worst(FIGURES) == {"slowdown_shared_gpu_max": 0.02 * 32 * 3 / 100, "trained_tokens_s_shared_gpu": 1500.0}


@pytest.mark.parametrize("budget", ["0", "1", "nan", "x"])
def test_a_budget_is_a_share(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--budgets", budget])
    assert f"{budget}: must be a share, between 0 and 1" in capsys.readouterr().err


def test_a_row_for_each_budget_and_batch() -> None:
    shown = table(measured_here("sharing", ["x"], FIGURES))
    assert "| 3% | 32 | 1.9% (1.0 to 2.9) | 1.9% | 48,000 | 0.800 |" in shown
    assert shown.count("| 10% |") == 2
