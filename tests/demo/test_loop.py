"""What the demo's second part makes of its figures; the loop itself is in tests/server."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from tlt_client import Event, Status
from tlt_client.schemas import AcceptLength, Arm, Counters, Models
from tlt_grpo.log import Step

from tests.demo.test_run import FIGURES as FIRST_PART
from tlt_server.demo.live import Now, View, draw, rows_of, summary, table
from tlt_server.demo.loop import count, faults
from tlt_server.demo.parts import as_text
from tlt_server.results import Figures


def step(number: int, accept_length: float | None, drafters: tuple[int, ...]) -> Step:
    return Step(
        step=number, weight_version=str(number - 1), target_versions=(number,), drafter_versions=drafters, responses=64,
        reward=0.7, length_mean=120.0, length_p90=300.0, length_max=512, accept_length=accept_length, tokens=7680,
        tokens_per_s=1500.0, rollout_s=5.0, grade_s=0.0, learn_s=5.0, publish_s=0.1, keep_s=0.0, step_s=10.1,
        failed_requests=0, learnt=None,
    )  # fmt: skip


def swap(version: int) -> Event:
    return Event(number=version, time=0.0, kind="drafter_swapped", replica=0, detail={"version": version})


STEPS = [step(1, None, ()), step(2, 1.3, (0, 1)), step(3, 2.1, (2, 3))]
EVENTS = [swap(1), swap(2), swap(3), swap(3), Event(number=9, time=0.0, kind="target_published", replica=0, detail={})]


@pytest.fixture
def figures() -> Figures:
    return count(STEPS, 5, EVENTS)


def test_the_figures_hold_a_row_for_each_step(figures: Figures) -> None:
    assert figures["requests"] == 192
    assert (figures["rl_steps"], figures["target_versions"], figures["drafter_versions_live"]) == (3, 5, 3)
    first, _, last = rows_of(figures)
    assert (first["accept_length"], first["drafter_version"]) == (1.0, 0)
    assert (last["accept_length"], last["drafter_version"], last["target_version"]) == (2.1, 3, 3)


def test_a_sound_run_has_no_faults(figures: Figures) -> None:
    assert faults(figures) == []
    assert "nothing: 1.00; in the last: 2.10" in summary(figures)


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("failed_requests", 2, "2 of 192 requests failed"),
        ("target_versions", 4, "target_versions is 4, of at least 5"),
        ("drafter_versions_live", 2, "drafter_versions_live is 2, of at least 3"),
    ],
)
def test_every_fault_is_named(figures: Figures, figure: str, value: int, said: str) -> None:
    assert faults(figures | {figure: value}) == [said]


def test_every_step_is_shown_once(figures: Figures) -> None:
    page = Console(width=120, file=io.StringIO())
    rows = rows_of(figures)
    with View(page, 3) as view:
        view.show(rows[:1], None)
        view.show(rows, None)
        view.show(rows, None)
    page.print(table(rows, "all"))
    text = page.file.getvalue()
    assert [text.count(f"step {number} of 3") for number in (1, 2, 3)] == [1, 1, 1]
    assert text.count("2.10") == 2


STATUS = Status(
    version="0.1.0", sglang_version="0.5.17", models=Models("t", "d"), speculation=True, arm=Arm(3, 1, 4),
    accept_length=AcceptLength(2.1, 2.0), counters=Counters(1, 3, 2, (1, 1, 0)), uptime_s=1.0, help="all well",
)  # fmt: skip


def test_a_terminal_shows_how_all_three_stand(figures: Figures) -> None:
    page = Console(width=120, file=io.StringIO(), force_terminal=True, highlight=False)
    with View(page, 3) as view:
        view.show(rows_of(figures)[:2], Now(STATUS, "training", 40, 9000))
        view.show(rows_of(figures)[:2], None)
    text = page.file.getvalue()
    for said in ("RL, 2 of 3 steps", "1.30", "arm 3,1,4", "all well", "training; 40 steps, 9000 tokens received"):
        assert said in text


def test_both_parts_are_shown_where_both_were_run(figures: Figures) -> None:
    alone = as_text(FIRST_PART)
    assert as_text(FIRST_PART | figures | {"requests": 1520, "failed_requests": 0}).startswith(alone)
    assert "drafter" in as_text(FIRST_PART | figures).removeprefix(alone)


def test_the_picture_is_a_png(figures: Figures, tmp_path: Path) -> None:
    draw(rows_of(figures), tmp_path / "new" / "demo.png")
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")
