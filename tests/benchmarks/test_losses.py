"""The comparison of losses: all of them are trained and judged, every figure is defined and shown."""

import pytest

from benchmarks.commands.learning import losses as bench_losses
from benchmarks.commands.learning.losses import NAMES, SIDES, SMOKE, figures, measured, shown
from tests.benchmarks.test_tables import rows
from tests.test_results import undefined
from tlt_server import results


@pytest.mark.slow
def test_every_loss_makes_a_drafter_of_its_own() -> None:
    found = measured(SMOKE._replace(steps=3), [0])
    assert set(found) == set(NAMES)
    lengths = [length for by_seed in found.values() for length in by_seed.values()]
    assert all(1 <= length <= 1 + bench_losses.DEPTH for length in lengths)
    assert len(set(lengths)) > 3


def test_figures_are_of_all_seeds_and_shown() -> None:
    made = figures(SMOKE, {name: {0: 1.5, 1: 2.5} for name in NAMES} | {"hass_cross_entropy": {0: 3.0, 1: 3.5}})
    assert not undefined(made)
    assert made["expected_accept_length_hass_cross_entropy"] == pytest.approx(3.25)
    table = {row[0]: row[1:] for row in rows(shown(results.measured_here("losses", [], made)))}
    assert table["HASS, 3 steps"] == ["3.25 (3.00 to 3.50)", *["2.00 (1.50 to 2.50)"] * 4]
    assert {side.words for side in SIDES.values()} <= set(table)
