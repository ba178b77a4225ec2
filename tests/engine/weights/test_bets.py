"""The rates that a trial states, and what they are on traffic that does not keep to what they assume."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic import MOST, modelled, one_of, recorded

from tlt_server.engine.weights import bets
from tlt_server.engine.weights.bets import (
    LEAST,
    LEAST_REQUESTS,
    STRETCH,
    Stretch,
    Stretches,
    Trial,
    Verdict,
    lower_bound,
)

LEVELS = st.floats(0.02, 0.98)
FOUND = st.lists(st.builds(Stretch, st.sampled_from("abc"), st.floats(0, 1)), max_size=60)


@given(LEVELS, FOUND, st.sampled_from("abcd"), st.floats(0, 1), st.floats(0, 1))
def test_no_bet_pays_on_average(level: float, found: list[Stretch], request: str, low: float, high: float) -> None:
    """Which is all that the rates need: whatever came before, a stretch whose mean is the level, however it is
    distributed, gains nothing on average; here two outcomes around it. And no outcome makes a wealth negative."""
    low, high = level * low, level + (1 - level) * high
    p = 0.5 if high == low else (level - low) / (high - low)
    trials = [Trial(level) for _ in range(3)]
    for trial in trials:
        for stretch in found:
            trial.add(stretch)
    trials[1].add(Stretch(request, low))
    trials[2].add(Stretch(request, high))
    for name in ("_worse", "_as_good"):
        before, lower, higher = (getattr(trial, name) for trial in trials)
        assert min(lower + higher) >= 0
        for one, down, up in zip(before, lower, higher, strict=True):
            assert (1 - p) * down + p * up == pytest.approx(one, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["coin", "uniform", "sticky"])
def test_the_false_alarm_rate_is_what_it_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the level itself, at a rate that can be measured; the bound leaves some of it unused."""
    monkeypatch.setattr(bets, "ALARM_RATE", 0.1)
    monkeypatch.setattr(bets, "PASS_RATE", 1e-9)
    level, runs, alarms = 0.4, 300, 0
    for seed in range(runs):
        draw, trial, last = random.Random(seed), Trial(level), level
        for i in range(400):
            share = {"coin": float(draw.random() < level), "uniform": draw.uniform(0, 2 * level)}.get(kind)
            if share is None:  # as far from the level as the last one was, on either side
                share = last = level + abs(last - level or 0.3) * draw.choice((-1, 1))
            if trial.add(Stretch(str(i), share)) is Verdict.WORSE:
                alarms += 1
                break
    assert 0 < alarms <= 0.1 * runs + 3 * (0.1 * runs) ** 0.5


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, MOST), max_size=6), max_size=60))
def test_stretches_are_runs_of_passes(steps: list[dict[str, int]]) -> None:
    """Of one request in consecutive steps, none counted twice."""
    stretches, runs = Stretches(MOST), {request: [] for request in "abcdef"}
    for step in steps:
        runs = {request: [*runs[request], step[request]] if request in step else [] for request in runs}
        expected = {request: run for request, run in runs.items() if run and len(run) % STRETCH == 0}
        complete = stretches.add(list(step.items()))
        assert {each.request: each.share for each in complete} == {
            request: sum(run[-STRETCH:]) / (STRETCH * MOST) for request, run in expected.items()
        }


def test_what_a_baseline_needs() -> None:
    def found(count: int, requests: int) -> list[Stretch]:
        return [Stretch(str(i % requests), 0.5) for i in range(count)]

    assert lower_bound(found(LEAST, LEAST_REQUESTS)) == 0.5
    assert lower_bound(found(LEAST - 1, LEAST_REQUESTS)) is None
    assert lower_bound(found(1000, LEAST_REQUESTS - 1)) is None


def test_requests_that_differ_are_less_sure() -> None:
    """Of the same shares: they say less where each request has but one of them."""
    shares = [0.2, 0.4, 0.6, 0.8] * 64
    apart = [Stretch(str(i), share) for i, share in enumerate(shares)]
    together = [Stretch(str(share), share) for share in shares]
    sure, unsure = lower_bound(apart), lower_bound(together)
    assert sure is not None
    assert unsure is not None
    assert 0.4 < sure < 0.5
    assert unsure < 0.15


def test_one_request_alone_counts_for_less() -> None:
    def stretches(requests: int) -> int:
        trial, n = Trial(0.5), 0
        while trial.add(Stretch(str(n % requests), 0.3)) is None:
            n += 1
        return n

    assert stretches(1) > 3 * stretches(1000)


def covered(traffic: str, seed: int) -> bool:
    """Whether a bound from 64 requests is below what a large sample has."""
    one = one_of(recorded()["start"]) if traffic == "recorded" else modelled(0.6, 0.15)
    draw = random.Random(seed)

    def sample(count: int) -> list[Stretch]:
        requests = [one(draw) for _ in range(count)]
        return [
            Stretch(str(i), sum(counts[at : at + STRETCH]) / (STRETCH * MOST))
            for i, counts in enumerate(requests)
            for at in range(0, len(counts) - STRETCH + 1, STRETCH)
        ]

    bound = lower_bound(sample(64))
    assert bound is not None
    large = sample(250)
    return bound < bets.mean_of(large)


@pytest.mark.parametrize("traffic", ["recorded", "modelled"])
def test_a_lower_bound_is_one(traffic: str) -> None:
    assert sum(covered(traffic, seed) for seed in range(12)) == 12
