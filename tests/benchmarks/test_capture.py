"""What benchmarks/commands/speed/capture.py computes of windows, and shows of its figures."""

from pathlib import Path

import pytest

from benchmarks.commands.speed.capture import FEATURES, as_table, followed, overheads
from benchmarks.lib.comparison import PLAIN, Measured
from benchmarks.lib.decoding import Load, Window
from tlt_server.cli import read_config
from tlt_server.results import measured_here


def steps(milliseconds: float, accepted: float) -> list[Window]:
    return [Window(4, 0, 4 * accepted * 1000 / milliseconds, accepted, graph=True)] * 2


def test_an_overhead_is_what_steps_take_longer_round_by_round(tmp_path: Path) -> None:
    """A machine that slows down in the second round slows all sides, and what is accepted costs nothing."""
    load = Load("batch_4", [(1,)] * 4, 64)
    given = {PLAIN: (100, 200, 100), "default": (102, 202, 104), "everything": (110, 220, 109)}
    windows = {
        (name, load.name): [steps(value, 3.0 + 0.5 * ((place + len(name)) % 3)) for place, value in enumerate(values)]
        for name, values in given.items()
    }
    figures = overheads(Measured([], windows, 9, 0), [load])
    assert figures["tokens_per_s_untapped_batch_4"] == pytest.approx(140)
    assert figures["capture_overhead_default_batch_4"] == pytest.approx(0.02)
    assert figures["capture_overhead_min_default_batch_4"] == pytest.approx(0.01)
    assert figures["capture_overhead_max_default_batch_4"] == pytest.approx(0.04)
    assert figures["capture_overhead_everything_batch_4"] == pytest.approx(0.1)
    assert figures["capture_overhead_max"] == pytest.approx(0.1)
    checked = {"states": 1000, "wrong_states": 0, "missing_states": 0, "cosine_min": 0.99}
    text = as_table(measured_here("capture", ["x"], figures | checked))
    assert "| longer: default | 2.0% (1.0 to 4.0) |" in text
    assert "1,000 states compared: 0 wrong" in text


def test_sides_differ_in_what_they_send_alone(tmp_path: Path) -> None:
    with followed(tmp_path) as (sides, _):
        configs = {name: read_config(Path(side.flags[1])) for name, side in sides.items()}
    assert configs.keys() == FEATURES.keys()
    assert [config.taps for config in configs.values()] == [False, True, True]
    assert {config.trainer.features for config in configs.values() if config.trainer} == {
        config.trainer.features for config in (configs["default"],) if config.trainer
    }
    assert configs["everything"].features.budget_mb_s > configs["default"].features.budget_mb_s
