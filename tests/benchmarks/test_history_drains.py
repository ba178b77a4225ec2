"""Drains of groups with history and without: which servers they ask, what they are held against, that figures are
defined and shown."""

from pathlib import Path

import pytest

from benchmarks.lib.command import Models
from benchmarks.lib.draining import DecodeStep
from benchmarks.lib.history.drained import CLAIMS, EPOCHS, UNREPEATED, Run, as_table, figures_of, tokens_a_pass
from benchmarks.lib.history.drains import ARMS, SMOKE, batches, turns
from benchmarks.lib.sides import Site, servers_of
from tests.definitions import undefined
from tlt_server.config import Arm
from tlt_server.demo import default_paths
from tlt_server.results import measured_here
from tlt_server.strategy.arms import Choice

HISTORY, CHAIN = Arm.history(7), Arm(3, 1, 4)
FLAGS: dict[str, tuple[str, ...]] = {"undrafted": (), "arms": ("--watchdog", "observe")}


def run(arm: Choice, seconds: float, given: int = 1) -> Run:
    """Two requests of 100 tokens, by steps of 10 ms."""
    steps = [DecodeStep(arm, 2, 2 * given, 0.01)] * (100 // given)
    return Run(seconds, [100, 100], steps)


def runs(states: list[str]) -> dict[tuple[str, str], list[Run]]:
    kinds = {"plain": (None, 1.0), "bandit": (CHAIN, 0.5), "history": (HISTORY, 0.4), "drafter": (HISTORY, 0.25)}
    return {
        (turn.name, batch): [run(arm, seconds, 1 if arm is None else 4)]
        for turn in turns(SMOKE, states, FLAGS)
        for arm, seconds in [kinds[turn.name.split("_")[-1]]]
        for batch in turn.batches
    }


def test_each_claim_is_held_against_what_it_names() -> None:
    figures = figures_of(runs(["none", "fresh", "stale"]), [1, 2])
    assert set(CLAIMS) <= set(figures)
    assert figures["drain_no_drafter_second_epoch"] == pytest.approx(4)
    assert figures["drain_stale_bandit_first_epoch"] == pytest.approx(2)
    assert figures["drain_fresh_over_bandit"] == figures["drain_unrepeated_over_bandit"] == pytest.approx(1.25)
    assert figures["tokens_a_pass_stale_history_first_epoch"] == pytest.approx(4)
    assert figures["share_history_no_drafter_first_epoch"] == 1
    assert figures["step_ms_drafter_history_7_batch_2"] == pytest.approx(10)


def test_a_response_that_is_longer_than_plain_decodings_counts_as_longer() -> None:
    found = runs(["none"])
    found["no_drafter", EPOCHS[0]] = [run(HISTORY, 0.5)._replace(lengths=[200, 200])]
    assert figures_of(found, [1, 2])["drain_no_drafter_first_epoch"] == pytest.approx(4)


def test_what_was_not_measured_is_not_claimed() -> None:
    figures = figures_of(runs(["fresh"]), [1, 2])
    assert "drain_fresh_over_bandit" in figures
    assert not [claim for claim in figures if "no_drafter" in claim or "stale" in claim]


def test_tokens_of_a_pass_are_of_those_over_drafts() -> None:
    assert tokens_a_pass(Run(1.0, [], [DecodeStep(None, 4, 4, 1.0), DecodeStep(CHAIN, 2, 6, 1.0)])) == 3
    assert tokens_a_pass(Run(1.0, [], [DecodeStep(None, 4, 4, 1.0)])) == 1


def test_history_alone_has_a_server_without_a_drafter() -> None:
    sides = [turn.side for turn in turns(SMOKE, ["none", "fresh"], FLAGS)]
    site = Site(Path("target"), Path("drafter"), Path("logs"), SMOKE.sizes, 64)
    commands = {side.server: site.command(side)[1] for side in servers_of(sides)}
    assert set(commands) == {"undrafted", "arms"}
    alone, both = (commands[name][commands[name].index("--drafter") :] for name in ("undrafted", "arms"))
    assert alone[:4] == ["--drafter", "none", "--arm", "history:7"]
    assert both[:6] == ["--drafter", "drafter", "--arm", "3,1,4", "--arm", "history:7"]
    assert all(side.server == "arms" for side in [turn.side for turn in turns(SMOKE, ["fresh"], FLAGS)])


def test_epochs_have_the_same_prompts_and_other_seeds() -> None:
    made = batches(Models(*default_paths()), SMOKE)
    first, second, alone = (made[name] for name in (*EPOCHS, UNREPEATED))
    assert [prompt for prompt, _ in first] == [prompt for prompt, _ in second]
    assert len({tuple(prompt) for prompt, _ in first}) == SMOKE.requests // SMOKE.group
    assert len({tuple(prompt) for prompt, _ in [*first, *alone]}) == SMOKE.requests // SMOKE.group + SMOKE.requests
    seeds = [params["sampling_seed"] for _, params in (*first, *second, *alone)]
    assert len(set(seeds)) == 3 * SMOKE.requests


def test_figures_are_defined_and_shown() -> None:
    figures = figures_of(runs(["none", "fresh", "stale"]), [1, 2])
    figures |= {"graphs_gb_arms": 2.5, "graphs_gb_undrafted": 1.5, "requests": 40, "failed_requests": 0}
    figures |= {f"step_ms_drafter_chain_{arm.num_steps}_batch_2": 5 for arm in ARMS}
    assert not undefined(figures)
    shown = as_table(measured_here("history", ["python"], figures))
    assert "| `drain_no_drafter_second_epoch` | 4.00 |" in shown
    assert "| unrepeated history unrepeated | 0.40 | 4.00 | 100 | 0 | 0 |" in shown
