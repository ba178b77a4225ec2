"""A draining batch: what runs at which size, what is learnt of it, and the rules that it is replayed by."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.commands.project import plots
from benchmarks.commands.speed import drain as bench_drain
from benchmarks.commands.speed.drain import natural, recorded, rivals
from benchmarks.lib.command import Models
from benchmarks.lib.drained import Drained, drain_figures, summary, trace_figures
from benchmarks.lib.draining import DecodeStep, Speeds, decode_seconds, decode_steps, spans, switching_ms, trace
from benchmarks.lib.training.lengths import GROUP, PROBLEMS, kept
from tests.definitions import undefined
from tlt_server.config import Arm
from tlt_server.demo import default_paths
from tlt_server.engine.decode.steplog import SettledStep
from tlt_server.results import measured_here
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.settings import faults

CHAIN, TREE = Arm(3, 1, 4), Arm(5, 4, 16)
SIZES = (1, 2, 4, 8)
LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=8)


def steps(arm: Choice, batch: int, accepted: int, seconds: float, count: int = 5) -> list[DecodeStep]:
    return [DecodeStep(arm, batch, batch * accepted, seconds)] * count


# off: 100 tokens/s at any size; the chain is faster but for 8 requests; the tree for one alone
KNOWN = Speeds(
    [
        *(each for batch in SIZES for each in steps(None, batch, 1, 0.01)),
        *(each for batch in (1, 2, 4) for each in steps(CHAIN, batch, 3, 0.015)),
        *steps(CHAIN, 8, 3, 0.06),
        *steps(TREE, 1, 5, 0.02),
    ],
    SIZES,
)


@given(LENGTHS)
def test_spans_hold_all_tokens(lengths: Sequence[int]) -> None:
    found = list(spans(lengths))
    assert sum(batch * tokens for batch, tokens in found) == sum(lengths)
    assert sum(tokens for _, tokens in found) == max(lengths)
    assert [batch for batch, _ in found] == sorted({batch for batch, _ in found}, reverse=True)


@given(LENGTHS, st.sampled_from([None, CHAIN, TREE]))
def test_no_rule_is_faster_than_the_oracle(lengths: Sequence[int], arm: Choice) -> None:
    oracle = KNOWN.replay(lengths, KNOWN.best)
    assert oracle <= KNOWN.replay(lengths, lambda _: arm) + 1e-12
    choice, threshold = KNOWN.elastic(lengths, {CHAIN: 8, TREE: 1})
    assert oracle <= KNOWN.replay(lengths, lambda batch: choice if batch <= threshold else None) + 1e-12
    assert KNOWN.replay(lengths, lambda _: None) == pytest.approx(max(lengths) / 100)


def test_a_batch_runs_at_the_size_that_it_is_padded_to() -> None:
    assert [KNOWN.size(batch) for batch in (1, 3, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 8]
    assert KNOWN.at(3) == KNOWN.at(4) == pytest.approx({None: 100, CHAIN: 200})


def test_the_table_names_the_best_and_nothing_beyond_what_was_measured() -> None:
    assert KNOWN.table() == {1: TREE, 2: CHAIN, 5: None}
    small = Speeds([*steps(CHAIN, 1, 3, 0.01), *steps(CHAIN, 4, 3, 0.01)], SIZES)
    assert small.table() == {1: CHAIN, 2: None, 3: CHAIN, 5: None}


def test_a_choice_costs_what_the_best_arm_would_have_saved() -> None:
    best, slow, unknown = (steps(arm, 2, 3, 0.02, 1) for arm in (CHAIN, None, TREE))
    assert KNOWN.lost(best) == 0
    assert KNOWN.lost([*best, *slow]) == pytest.approx(0.25)
    assert KNOWN.lost([*best, *unknown]) == pytest.approx(0.5)


def test_the_elastic_rule_is_the_best_of_its_kind() -> None:
    assert KNOWN.elastic([100] * 4 + [400] * 4, {CHAIN: 8, TREE: 1}) == (CHAIN, 4)
    assert KNOWN.elastic([10, 10_000], {CHAIN: 8, TREE: 1}) == (TREE, 1)


def test_a_few_steps_are_no_measurement() -> None:
    known = Speeds([*steps(None, 2, 1, 0.01), *steps(CHAIN, 2, 9, 0.01, count=4)], SIZES)
    assert known.at(2) == {None: pytest.approx(100)}
    assert known.at(8) == known.at(2)
    with pytest.raises(ValueError, match="let more requests drain"):
        Speeds(steps(CHAIN, 1, 3, 0.01, count=4), SIZES)


def log(batches: Sequence[int], arm: Choice = CHAIN, seconds: float = 0.015, accepted: int = 3) -> list[SettledStep]:
    """A prefill at 1 s, then decode steps of these batches, then one whose requests have all ended."""
    made = [SettledStep(1.0, False, None, {str(i): 1 for i in range(batches[0])})]
    for number, batch in enumerate([*batches, 0], 1):
        made.append(SettledStep(1 + seconds * number, True, 0, {str(i): accepted for i in range(batch)}, arm))
    return made


def test_a_step_has_a_time_if_it_follows_a_decode_step() -> None:
    found = decode_steps(log([2, 2, 1]))
    assert [(step.arm, step.batch, step.tokens) for step in found] == [(CHAIN, 2, 6), (CHAIN, 1, 3)]
    assert [step.seconds for step in found] == pytest.approx([0.015, 0.015])
    assert decode_seconds(log([2, 2, 1])) == pytest.approx(0.045)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=60), st.integers(1, 12))
def test_a_trace_loses_no_step(batches: Sequence[int], bins: int) -> None:
    made = [DecodeStep(CHAIN if batch < 4 else None, batch, 3 * batch, 0.01 * batch) for batch in batches]
    found = trace(made, bins)
    assert len(found) <= bins
    assert sum(sum(each.steps.values()) for each in found) == len(made)
    assert all(min(batches) - 1e-9 <= each.running <= max(batches) + 1e-9 for each in found)
    assert found[-1].end_s == pytest.approx(sum(step.seconds for step in made))


def test_rivals_are_what_a_server_takes() -> None:
    elastic, table = rivals(KNOWN, [100] * 8, {CHAIN: 8, TREE: 1})
    for side in (elastic, table):
        assert side.strategy is not None
        assert faults(side.strategy, {CHAIN: 8, TREE: 1}, 24) == []
        assert not side.learns


@given(st.integers(0, 1000), st.floats(0, 0.01), st.floats(-0.5, 1.5))
def test_switching_costs_what_all_steps_take_more(seed: int, cost: float, late: float) -> None:
    """Whether it shows in the step that switches or, `late`, in the one before, which may even get some of it back."""
    alone: dict[Choice, float] = {None: 0.01, CHAIN: 0.015, TREE: 0.02}
    drawn = Random(seed).choices(list(alone), k=600)
    made = [
        DecodeStep(arm, 4, 4, alone[arm] + cost * (1 - late) * (before != arm) + cost * late * (arm != after))
        for before, arm, after in zip(drawn, drawn[1:], drawn[2:], strict=False)
    ]
    assert switching_ms(made) == pytest.approx(1000 * cost, rel=0.02, abs=1e-9)
    assert switching_ms(made[:4]) is None
    assert switching_ms([step for step in made if step.arm is None]) is None


def test_drains_are_compared_round_by_round() -> None:
    """Two requests of four tokens each: the oracle decodes with the chain at 200 tokens/s each."""
    chain, plain, both = log([2] * 6), log([2] * 6, None, 0.01, 1), [16, 16]
    found = {
        "plain": [[Drained(1.0, both, [])], [Drained(2.0, both, [])]],
        "off": [[Drained(1.0, both, plain)], [Drained(2.0, both, plain)]],
        "chain_3": [[Drained(0.5, both, chain)], [Drained(1.0, both, chain)]],
        "bandit": [
            [Drained(0.625, both, chain, 30.0), Drained(0.5, both, chain, 40.0), Drained(9.0, both, chain)],
            [Drained(1.25, both, chain, 60.0)] * 3,
        ],
        "upstream_adaptive": [[Drained(0.75, both, [])], [Drained(1.5, both, [])]],
    }
    figures = drain_figures(found, ["off", "chain_3"], KNOWN, "2")
    assert summary(figures) == {"drain_speedup_2": 1.6}
    assert figures["drain_ratio_to_adaptive_2"] == pytest.approx(1.2)
    assert figures["drain_ratio_to_best_arm_2"] == pytest.approx(0.8)
    assert figures["drain_oracle_s_2"] == pytest.approx(16 / 200)
    assert figures["drain_ratio_to_oracle_2"] == pytest.approx(16 / 200 / 0.09)
    assert (figures["drain_lost_2"], figures["drains_bandit_2"]) == (0, 6)
    assert figures["selecting_us_2"] == 60
    assert figures["drain_replay_off_2"] == pytest.approx(16 / 100 / 0.06)
    kept = measured_here("drain", ["python"], figures | {"requests": 4, "failed_requests": 0})
    shown = bench_drain.table(kept)
    for row in ("| bandit | 1.25 | 1.60 |", "| SGLang, adaptive |", "| chain 3,1,4 |", "| bandit / oracle | 0.889 |"):
        assert row in shown
    assert not undefined(figures | trace_figures(decode_steps(chain), "2"))


def test_drains_of_other_lengths_are_held_against_plain_decoding_of_the_same() -> None:
    """All decode at 100 tokens/s and request, the bandit at 200; the static peer at 250, whose longest is shorter."""
    plain, chain = log([2] * 6, None, 0.01, 1), log([2] * 6)
    found = {
        "plain": [[Drained(4.0, [100, 400], [])]],
        "off": [[Drained(1.0, [100], plain)]],
        "bandit": [[Drained(1.0, [30, 200], chain)]],
        "bandit_cold": [[Drained(4.0, [50, 600], chain)]],
        "upstream_chain_7": [[Drained(0.2, [10, 50], [])]],
    }
    figures = drain_figures(found, ["off"], KNOWN, "natural_2")
    claims = {
        "drain_natural_speedup_2": 2.0,
        "drain_natural_cold_speedup_2": 1.5,
        "drain_natural_over_static_2": 0.8,
        "drain_natural_cold_over_static_2": 0.6,
    }
    assert summary(figures) == pytest.approx(claims)
    kept = measured_here("drain", ["python"], figures | claims | {"requests": 4, "failed_requests": 0})
    assert "| bandit | 1.00 | 2.00 |" in bench_drain.table(kept)
    assert "2 natural requests" in bench_drain.table(kept)
    assert not undefined(figures | claims)


def test_a_drain_is_drawn() -> None:
    """Of two numbers of requests, a column each."""
    figures = trace_figures(decode_steps(log([2] * 6)), "2") | trace_figures(decode_steps(log([4] * 6, None)), "4")
    figure = plots.draw(measured_here("drain", ["python"], figures))
    running = [axes.lines[0].get_ydata() for axes in figure.axes[:2]]
    assert [list(each) for each in running] == [pytest.approx([2] * 5), pytest.approx([4] * 5)]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"chain 3,1,4", "off"}


def test_the_work_is_the_embedded_targets_own() -> None:
    models = Models(*default_paths())
    requests = recorded(models, 512)
    prompts = models.prompts(PROBLEMS)
    lengths = sorted(int(params["max_new_tokens"]) for _, params in requests)
    assert len(requests) == 512
    assert [prompt for prompt, _ in requests[:PROBLEMS]] == prompts == [prompt for prompt, _ in requests[-PROBLEMS:]]
    assert [len(prompt) for prompt in prompts] == [length.prompt for length in kept()[::GROUP]]
    assert lengths[-1] > 4 * lengths[256]
    assert recorded(models, 128) == requests[:128]


def test_natural_requests_come_in_groups_and_may_end_by_themselves() -> None:
    requests = natural(Models(*default_paths()), 20)
    prompts = [prompt for prompt, _ in requests]
    assert [prompts.count(prompt) for prompt in dict.fromkeys(prompts)] == [8, 8, 4]
    asked = {"temperature": 1.0, "max_new_tokens": 1024}
    assert all(params == {**asked, "sampling_seed": seed} for seed, (_, params) in enumerate(requests))
