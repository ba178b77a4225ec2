"""Figures of a made log of settled steps: what is a step's time, what a swap took of it, what is accepted after one."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.commands.reload.swap import Drafters, swap_figures
from benchmarks.lib.reload.pushing import Swap
from benchmarks.lib.reload.steps import Disturbance, Intervals, Span, accept_length, cut, quantile, starts_of, taken_up
from tlt_server.engine.decode.steplog import SettledStep

BATCH = 2


def made(ms: list[float], version: int = 0) -> list[SettledStep]:
    """Decode steps of a whole batch that take so long, after one at 0."""
    times = [0.0]
    for each in ms:
        times.append(times[-1] + each / 1000)
    return [SettledStep(at, True, version, {"a": 3, "b": 4}) for at in times]


def test_only_decode_steps_of_the_whole_batch_have_a_time() -> None:
    steps = made([10, 10, 10, 10, 10])
    steps[2] = SettledStep(steps[2].settled, False, 0, {"c": 1})
    steps[5] = SettledStep(steps[5].settled, True, 0, {"a": 3})
    found = Intervals.of(steps, BATCH).ms
    assert found == [pytest.approx(10), None, None, pytest.approx(10), None]


def test_a_stall_is_found_in_its_span_alone() -> None:
    intervals = Intervals.of(made([10] * 5 + [35] + [10] * 5), BATCH)
    usual = intervals.median_ms([Span(0, 0.04)])
    assert usual == pytest.approx(10)
    stalled = Span(0.045, 0.075)  # from within the fifth step to within the seventh
    found = intervals.disturbance(stalled, usual)
    assert found is not None
    assert (found.worst_ms, found.lost_ms) == pytest.approx((35, 25))
    assert intervals.disturbance(Span(0.01, 0.03), usual) == Disturbance(pytest.approx((10, 10, 10)), pytest.approx(0))


def test_a_swap_beside_a_prefill_is_left_out() -> None:
    steps = made([10] * 6)
    steps[3] = SettledStep(steps[3].settled, False, 0, {"c": 1})
    intervals = Intervals.of(steps, BATCH)
    assert intervals.disturbance(Span(0.015, 0.025), 10) is None
    assert intervals.disturbance(Span(0.045, 0.05), 10) is not None
    assert intervals.disturbance(Span(1.0, 1.1), 10) is None  # nothing ran


def test_a_swap_lasts_until_its_first_step() -> None:
    steps = [*made([10] * 3), SettledStep(0.045, True, 5, {"a": 1, "b": 1})]
    assert taken_up(steps, Span(0.001, 0.022), version=5) == Span(0.001, 0.045)
    assert taken_up(steps, Span(0.001, 0.022), version=6) == Span(0.001, 0.022)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_is_the_least_that_covers_its_share(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    below = [value for value in values if value < found]
    assert len(below) < share * len(values) or not below


@given(st.floats(0.5, 100), st.floats(0.5, 10))
def test_a_cut_span_has_equal_pieces_side_by_side(length: float, piece: float) -> None:
    pieces = cut(Span(3.0, 3.0 + length), piece)
    assert len(pieces) == pytest.approx(length / piece, abs=1)
    assert all(each.end <= 3.0 + length + 1e-6 for each in pieces)
    assert all(each.end - each.begin == pytest.approx(piece, abs=1e-9) for each in pieces)


def test_figures_of_a_made_log() -> None:
    """Twenty undisturbed steps, then three swaps of two steps each: one stalls by 30 ms, one by 5, one not at all."""
    steps = made([10] * 20 + [10, 40, 10, 10, 15, 10, 10, 10, 10])
    still = Span(0, steps[20].settled - 1e-6)
    begins = [steps[i].settled + 1e-4 for i in (20, 23, 26)]
    ends = [steps[i].settled - 1e-4 for i in (22, 25, 28)]
    swaps = [
        Swap(9 + i, Span(begin, end), staging_s=0.004, flip_s=0.001)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    figures = swap_figures(steps, BATCH, [still], swaps)
    assert figures["step_ms_median"] == pytest.approx(10)
    assert (figures["swaps"], figures["windows"]) == (3, 3)
    assert figures["worst_step_ms_p99"] == pytest.approx(40)
    assert (figures["windows_with_a_late_step"], figures["windows_with_a_late_step_undisturbed"]) == (1, 0)
    assert figures["step_ms_p99"] == pytest.approx(40)
    assert figures["lost_ms_p50"] == pytest.approx(5)
    assert figures["live_s_p50"] == pytest.approx(0.0248)
    assert figures["flip_ms_p50"] == pytest.approx(1)
    assert figures["worst_step_ms_p99_undisturbed"] == pytest.approx(10)
    assert figures["lost_ms_p50_undisturbed"] == pytest.approx(0, abs=1e-6)


def test_accept_lengths_after_a_swap() -> None:
    """Request a is swapped after 4 tokens, b after 6: prefill, two steps of the old drafter, three of the new one."""
    gave = [(False, 0, 1, 1), (True, 0, 1, 2), (True, 0, 2, 3), (True, 1, 1, 2), (True, 1, 2, 4), (True, 1, 4, 4)]
    steps = [SettledStep(i, decode, version, {"a": a, "b": b}) for i, (decode, version, a, b) in enumerate(gave)]
    starts = starts_of(steps, version=1)
    assert starts == {"a": 4, "b": 6}
    assert accept_length(steps, starts, 1) == (1 + 2) / 2
    assert accept_length(steps, starts, 3) == (1 + 2 + 2 + 4) / 4
    assert accept_length(steps, {"a": 0, "b": 0}, 2) == (1 + 2) / 2  # the prefill's token is no draft's


def test_each_drafter_pushed_is_what_it_is_called() -> None:
    drafters = Drafters(Path("start"), (Path("good1"), Path("good2")), Path("random"))
    chosen = drafters.choices(300)
    assert len(chosen) == 300
    kinds = [
        "random" if new == drafters.random else "identical" if new == old else "good" for old, new in pairwise(chosen)
    ]
    assert min(kinds.count(kind) for kind in ("good", "identical", "random")) > 40
    assert drafters.choices(300) == chosen
    assert set(random.Random(0).sample(chosen, 50)) <= {*drafters.good, drafters.random}
