"""What benchmarks/commands/speed/switching.py shows of its figures."""

from benchmarks.commands.speed import switching
from tlt_server.results import Figures, measured_here


def test_steps_stand_by_arm_and_batch_size_and_the_rest_below() -> None:
    figures: Figures = {"step_ms_off_batch_1": 4.7, "step_ms_off_batch_8": 4.9, "step_ms_chain_3_batch_8": 6.25}
    shown = switching.table(measured_here("switching", ["x"], figures | {"switching_ms": 0.125, "drawn_steps": 10_007}))
    assert "| off | 4.70 | 4.90 |" in shown
    assert "| chain 3,1,4 |  | 6.25 |" in shown
    assert "| switching_ms | 0.125 |\n| drawn_steps | 10007 |" in shown
