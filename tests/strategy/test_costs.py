"""Costs between, beyond and at the timed sizes, and how well a line in cached tokens fits what was measured."""

import pytest

from benchmarks.simulation.world import MEASURED, context_timings
from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.results import read
from tlt_server.strategy.costs import StepCosts, Timing

ARM = Arm(3, 1, 4)


def test_batches_between_timed_ones_lie_between_them_and_larger_ones_on_the_last_line() -> None:
    costs = StepCosts([Timing(None, batch, 0, seconds) for batch, seconds in ((2, 0.010), (4, 0.014), (8, 0.016))])
    at = [costs.seconds(None, batch, 0) for batch in (1, 2, 3, 4, 6, 8, 10)]
    assert at == pytest.approx([0.010, 0.010, 0.012, 0.014, 0.015, 0.016, 0.017])


def test_a_padded_batch_costs_what_the_next_timed_one_does() -> None:
    timings = [Timing(None, batch, 0, seconds) for batch, seconds in ((2, 0.010), (4, 0.014), (8, 0.016))]
    costs = StepCosts(timings, padded=True)
    at = [costs.seconds(None, batch, 0) for batch in (1, 2, 3, 4, 5, 8, 10)]
    assert at == pytest.approx([0.010, 0.010, 0.014, 0.014, 0.016, 0.016, 0.017])


def test_arms_that_are_given_up_are_gone_and_their_sizes_with_them() -> None:
    costs = StepCosts([Timing(None, 1, 0, 0.005), Timing(ARM, 2, 0, 0.007), Timing(Arm(7, 1, 8), 4, 0, 0.009)])
    assert costs.sizes == [1, 2, 4]
    assert set(costs.of([ARM]).arms) == {None, ARM}
    assert costs.of([ARM]).sizes == [1, 2]


def test_each_cached_token_adds_its_slope() -> None:
    timings = [Timing(None, batch, cached, 0.005 + 1e-8 * cached) for batch in (1, 8) for cached in (100, 100_000)]
    costs = StepCosts(timings)
    assert costs.seconds(None, 4, 1_000_000) == pytest.approx(0.015)


def test_one_context_says_nothing_of_another() -> None:
    costs = StepCosts([Timing(None, 1, 100, 0.005), Timing(None, 8, 800, 0.006)])
    assert costs.seconds(None, 8, 1_000_000) == pytest.approx(0.006)


def test_plain_decoding_must_be_timed() -> None:
    with pytest.raises(ConfigError, match="off was not timed"):
        StepCosts([Timing(ARM, 1, 0, 0.007)])


@pytest.mark.parametrize("side", ["plain", "chain_3", "chain_7"])
def test_measured_steps_lie_on_lines_in_cached_tokens(side: str) -> None:
    """On an H200, at 512 to 32k tokens, where each batch size has its own base: within a tenth of each measured step.

    The best arm changes with context there: that is what the term is for.
    """
    timings = context_timings(read(MEASURED / "context.h200.json").figures, side)
    costs = StepCosts(Timing(None, batch, cached, seconds) for batch, cached, seconds in timings)
    for batch, cached, seconds in timings:
        assert costs.seconds(None, batch, cached) == pytest.approx(seconds, rel=0.1), (batch, cached)
