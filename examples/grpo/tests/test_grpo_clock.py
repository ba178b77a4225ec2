"""The clock of a step, moved by hand; and what a run shows."""

from itertools import accumulate
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tlt_grpo.clock import Clock
from tlt_grpo.log import HeldOut, Step
from tlt_grpo.shown import PHASES, View, draw


def step(number: int) -> Step:
    said = {"step": number, "weight_version": str(number - 1), "target_versions": (), "drafter_versions": ()}
    counts = {"responses": 4, "length_max": 9, "tokens": 30, "failed_requests": 0, "learnt": None}
    floats = dict.fromkeys(("length_mean", "length_p90", "tokens_per_s", "step_s", *(f"{p}_s" for p in PHASES)), 1.0)
    return msgspec.convert(said | counts | floats | {"accept_length": None, "reward": 0.25}, Step)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_phases_and_what_is_between_them_make_the_whole(stretches: list[tuple[str, int, int]]) -> None:
    """Each stretch: a phase, its seconds, and those behind it that are of none."""
    times = iter([0.0, *accumulate(float(each) for _, inside, behind in stretches for each in (behind, inside))])
    now = [next(times)]
    clock = Clock(lambda: now[0])
    for name, _, _ in stretches:
        now[0] = next(times)
        with clock.phase(name):
            now[0] = next(times)
    found = clock.seconds()
    assert found.pop("whole") == sum(inside + behind for _, inside, behind in stretches)
    assert found == {
        name: sum(inside for other, inside, _ in stretches if other == name) for name in {each[0] for each in stretches}
    }


def test_a_phase_ends_when_the_device_is_done() -> None:
    now = [0.0]

    def settle() -> None:
        now[0] += 5

    clock = Clock(lambda: now[0], settle)
    with clock.phase("learn"):
        now[0] += 1
    assert clock.seconds()["learn"] == 6


def test_what_is_shown_is_a_line_each_and_a_picture(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    lines = [HeldOut(step=0, problems=4, accuracy=0.5), step(1), step(2)]
    with View(console, 2) as view:
        for line in lines:
            view.tell(line)
    assert console.export_text().splitlines() == [str(line) for line in lines]
    draw(lines, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
