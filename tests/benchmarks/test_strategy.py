"""The strategies' benchmark: what is asked of whom, what is computed of windows, how parts are joined."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tlt_client.schemas import SelectionBucket, StrategyUpdate

from benchmarks.commands.speed import strategy as bench_strategy
from benchmarks.commands.speed.strategy import BANDIT, cells, chosen, load_of, mean_rate, measured, summary, table
from benchmarks.lib import parts
from benchmarks.lib.command import parser
from benchmarks.lib.comparison import PLAIN, Measured, visit
from benchmarks.lib.decoding import Load, Window
from benchmarks.lib.sides import Side, Site, check_memory, name_of, servers_of
from benchmarks.lib.strategies import by_batch, fixed, learning
from benchmarks.lib.tables import RESULTS, command_of
from benchmarks.simulation.server import Server
from benchmarks.simulation.world import CHAINS, World
from tests.definitions import undefined
from tlt_server.config import Arm
from tlt_server.demo import default_paths
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result, measured_here
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.settings import faults, to_client

ARMS = (Arm(3, 1, 4), Arm(5, 4, 16))
MOST = {ARMS[0]: 128, ARMS[1]: 32}
LOAD = Load("batch_4", [(1,)] * 4, 64)


def rates(*values: float, accepted: float = 1.0) -> list[Window]:
    return [Window(4, 0, value, accepted, graph=True) for value in values]


def found(of: Mapping[str, Sequence[Sequence[Window]]]) -> Measured:
    known = [Side(PLAIN), *fixed(MOST, 256), *learning(ARMS)]
    return Measured(known, {(name, LOAD.name): each for name, each in of.items()}, 8, 0)


@given(st.lists(st.tuples(st.floats(10, 1e4), st.floats(1, 8)), min_size=1, max_size=9))
def test_a_rate_is_all_tokens_over_all_time(windows: list[tuple[float, float]]) -> None:
    made = [Window(4, 0, rate, accepted, graph=True) for rate, accepted in windows]
    tokens = sum(window.accept_length * window.batch for window in made)
    seconds = sum(window.step_ms for window in made) / 1000
    assert mean_rate(made) == pytest.approx(tokens / seconds)


def test_steps_that_explored_count() -> None:
    """One slow window of five, which a median does not see."""
    figures = cells(found({PLAIN: [rates(100)], "off": [rates(100)], BANDIT: [rates(*[100] * 4, 25)]}), [LOAD])
    assert figures["speedup_bandit_batch_4"] == pytest.approx(5 / 8)
    assert figures["ratio_to_best_bandit_batch_4"] == pytest.approx(5 / 8)


def test_shares_of_what_was_chosen() -> None:
    """Of three servers that decoded eight requests, one of them with half as many steps, and in the end one of them."""
    reports = []
    for seed, steps in enumerate((300, 300, 150)):
        world = World(Random(seed))
        server, levels = Server(world, StrategyUpdate(BANDIT)), world.new_levels(8)
        for batch in (*[8] * steps, *[1] * 100):
            server.step(levels[:batch], 200 * batch)
        reports.append(server.selector.report())
    figures = chosen(reports, BANDIT, 8)
    assert sum(value for name, value in figures.items() if name.startswith("time_")) == pytest.approx(1)
    assert figures["explored_lost_bandit_batch_8"] == pytest.approx(
        sum(each.explored_lost_s for each in reports) / sum(each.decoded_s for each in reports)
    )


def test_a_batch_that_drains_is_not_held_against_the_choices() -> None:
    """Eight requests have one arm, and the last of them another."""
    alone, together = (to_client(arm) for arm in CHAINS[:2])
    buckets = SelectionBucket(1, (alone,)), SelectionBucket(5, (together,))
    world = World(Random(0))
    server, levels = Server(world, StrategyUpdate(BANDIT, buckets=buckets)), world.new_levels(8)
    for batch in (*[8] * 50, *[1] * 50):
        server.step(levels[:batch], 200 * batch)
    figures = chosen([server.selector.report()], BANDIT, 8)
    assert figures == {f"time_{name_of(CHAINS[1])}_bandit_batch_8": 1}


def test_what_choices_lose_is_told_without_what_was_accepted_by_chance() -> None:
    """Half of the time with an arm at 0.9 of the best: whatever the bandit's own rate was."""
    shares = {"time_chain_3_bandit_batch_4": 0.5, "time_tree_5_4_16_bandit_batch_4": 0.5, "time_x_bandit_batch_4": 0.1}
    alone = {"off": 1.0, "chain_3": 2.0, "tree_5_4_16": 1.8, "upstream_adaptive": 3.0}
    figures = shares | {f"speedup_{side}_batch_4": value for side, value in alone.items()}
    for luck in (1.5, 2.5):
        made = summary(figures | {"speedup_bandit_batch_4": luck, "speedup_paper_batch_4": 2.2})
        assert made["chosen_lost_batch_4"] == made["max_chosen_lost"] == pytest.approx(0.05)
    assert "max_chosen_lost" not in summary({"speedup_bandit_batch_4": 2.0, "speedup_off_batch_4": 1.0})


@pytest.mark.parametrize(("batch", "tokens", "waves"), [(1, 512, 8), (4, 512, 4), (64, 512, 4), (256, 256, 2)])
def test_what_so_few_sample_decides_much(batch: int, tokens: int, waves: int) -> None:
    load = load_of([(1, 2)] * batch, smoke=False)
    assert (load.batch, load.tokens, load.waves) == (batch, tokens, waves)


@pytest.mark.parametrize("sizes", [bench_strategy.BATCHES, bench_strategy.CPU_BATCHES])
def test_the_cache_holds_every_batch(sizes: Sequence[int]) -> None:
    for size in sizes:
        load = load_of([(1, 2)] * size, smoke=False)
        assert size * (load.tokens + bench_strategy.RESERVED) <= bench_strategy.held_at(sizes)


def test_where_nothing_is_drafted_a_quarter_is_enough() -> None:
    load = Load("batch_1", [(1, 2)], 512, waves=8)
    sides = [Side(PLAIN), *fixed({ARMS[0]: 64}, 64), *learning(ARMS), Side("upstream", ARMS[0], upstream=True)]
    assert {side.name: visit(side, load).waves for side in sides} == {
        **{PLAIN: 2, "off": 2},
        **dict.fromkeys(("chain_3", "paper", "bandit", "upstream"), 8),
    }
    assert visit(sides[0], replace(load, waves=1)).waves == 1


def test_what_sglang_does_is_not_what_the_bandit_could_have_chosen() -> None:
    of = {PLAIN: [rates(100)] * 3, "chain_3": [rates(150)] * 3, "upstream_chain_3": [rates(300)] * 3}
    known = [*found(of).sides, Side("upstream_chain_3", ARMS[0], upstream=True)]
    figures = cells(replace(found(of), sides=known), [LOAD])
    figures |= {"time_chain_3_bandit_batch_4": 1.0, "speedup_bandit_batch_4": 1.5}
    assert summary(figures)["max_chosen_lost"] == 0


def test_the_best_is_what_does_not_learn_and_is_best_by_its_median() -> None:
    of = {
        PLAIN: [rates(100)] * 3,
        "off": [rates(99)] * 3,
        "chain_3": [rates(200), rates(200), rates(200)],
        "tree_5_4_16": [rates(150), rates(400), rates(150)],
        BANDIT: [rates(190), rates(194), rates(198)],
        "paper": [rates(300)] * 3,
    }
    figures = cells(found(of), [LOAD])
    assert figures["ratio_to_best_bandit_batch_4"] == pytest.approx(0.97)
    assert summary(figures) == pytest.approx(
        {
            "speedup_batch_4": 1.94,
            "min_ratio_to_best": 0.97,
            "min_ratio_to_plain": 1.94,
            "off_ratio_to_plain": 0.99,
        }
    )
    assert not undefined(figures | summary(figures))


def result(figures: Figures, **changes: object) -> Result:
    made = measured_here("strategy", ["python"], {"requests": 4, "failed_requests": 1, **figures})
    return Result(**{name: getattr(made, name) for name in made.__struct_fields__} | changes)


def test_parts_are_joined_and_their_summary_is_made_anew() -> None:
    one = {"speedup_bandit_batch_1": 2.5, "ratio_to_best_bandit_batch_1": 0.98, "speedup_off_batch_1": 0.99}
    other = {"speedup_bandit_batch_8": 1.5, "ratio_to_best_bandit_batch_8": 0.96, "speedup_off_batch_8": 1.0}
    others = {"rounds": 3}, {"rounds": 2}
    of = [result(each | summary(each) | more) for each, more in zip((one, other), others, strict=True)]
    made = parts.joined(of, summary).figures
    assert one.items() | other.items() <= made.items()
    assert (made["min_ratio_to_best"], made["min_ratio_to_plain"], made["off_ratio_to_plain"]) == (0.96, 1.5, 0.99)
    assert (made["speedup_batch_1"], made["speedup_batch_8"]) == (2.5, 1.5)
    assert (made["requests"], made["failed_requests"], made["rounds"]) == (8, 2, 2)


def test_a_joined_result_says_the_commands_of_all_parts() -> None:
    one, other = (result({f"speedup_{arm}_batch_1": 1.0}, argv=["x", arm]) for arm in ("off", "b c"))
    assert command_of(parts.joined([one, other], lambda _: {})) == "x off && x 'b c'"


def test_parts_of_two_machines_or_of_the_same_are_not_joined() -> None:
    figures: Figures = {"speedup_bandit_batch_1": 2.5}
    with pytest.raises(ConfigError, match="machine"):
        parts.joined([result({}, machine="a"), result({}, machine="b")], summary)
    with pytest.raises(ConfigError, match="speedup_bandit_batch_1: two parts"):
        parts.joined([result(figures), result(figures)], summary)


def test_parts_that_are_none_are_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in (
        (RESULTS / "nowhere.json", f"result {RESULTS}/nowhere.json: No such file or directory"),
        (
            RESULTS / "graphs.h200.json",
            f"--join: {RESULTS}/graphs.h200.json is of graphs. Name parts of strategy alone",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            parts.main(parser("strategy", None), ["--join", str(path)], measured, summary, table)
        assert (ended.value.code, capsys.readouterr().err) == (2, f"strategy: {message}\n")


def test_sides_with_arms_share_a_server(tmp_path: Path) -> None:
    sides = [Side(PLAIN), *fixed(MOST, 256), *learning(ARMS)]
    assert {side.server for side in servers_of(sides)} == {PLAIN, "arms"}
    target, drafter = default_paths()
    site = Site(target, drafter, tmp_path, (1, 8), 4096)
    module, flags, _ = site.command(sides[1])
    assert module == ["tlt_server", "serve"]
    assert " ".join(flags).endswith(f"--drafter {drafter} --arm 3,1,4 --arm 5,4,16")
    assert "--no-speculation" not in flags
    assert site.command(sides[-1]) == site.command(sides[1])
    check_memory(sides, site)
    with pytest.raises(ConfigError, match=r"2 servers of .* need .* GB"):
        check_memory(sides, replace(site, max_tokens=1 << 34))


def test_a_server_has_graphs_for_the_side_that_is_asked_most() -> None:
    sides = [*learning(ARMS), *fixed(MOST, 512), Side(PLAIN)]
    assert {side.server: side.max_batch for side in servers_of(sides)} == {PLAIN: 256, "arms": 512}


def test_every_strategy_is_one_that_a_server_takes() -> None:
    table = by_batch("table", ARMS, {1: ARMS[1], 17: ARMS[0], 129: None})
    for side in [*fixed(MOST, 256), *learning(ARMS), table]:
        assert side.strategy is not None
        assert faults(side.strategy, MOST, 256) == []


def decoded_by(side: Side, batches: Sequence[int]) -> list[set[Choice]]:
    """The arms that a simulated server decodes 50 steps of each batch size with."""
    world = World(Random(0))
    assert side.strategy is not None
    server = Server(world, side.strategy)
    levels = [world.new_levels(batch) for batch in batches]
    return [{server.step(each, 200 * len(each))[0].arm for _ in range(50)} for each in levels]


def test_a_table_is_followed() -> None:
    table = by_batch("table", CHAINS, {1: CHAINS[3], 17: CHAINS[1], 129: None})
    assert decoded_by(table, [1, 16, 17, 128, 129, 256]) == [{CHAINS[3]}] * 2 + [{CHAINS[1]}] * 2 + [{None}] * 2


def test_what_choosing_took_is_the_servers_own_count() -> None:
    """Of one batch size the median over the visits; claimed is the most of the bandit, and none of an older server."""
    report = Server(World(Random(0)), StrategyUpdate(BANDIT)).selector.report()
    figures = {}
    for batch, side, took in ((4, BANDIT, (30.0, 50.0, 40.0)), (8, BANDIT, (45.0, None)), (8, "paper", (90.0,))):
        figures |= chosen([structs.replace(report, selecting_us=us) for us in took], side, batch)
    assert (figures["selecting_us_bandit_batch_4"], figures["selecting_us_bandit_batch_8"]) == (40, 45)
    assert summary(figures)["selecting_us"] == 45
    assert "selecting_us" not in summary(chosen([report], BANDIT, 8))
    assert not undefined(figures | summary(figures))


def test_a_table_names_every_side() -> None:
    of = {name: [rates(100)] for name in (PLAIN, "off", "chain_3", "tree_5_4_16", BANDIT, "paper")}
    figures = cells(found(of), [LOAD])
    shown = bench_strategy.table(result(figures | summary(figures)))
    for title in ("| off |", "| chain 3,1,4 |", "| tree 5,4,16 |", "| bandit / best | 1.000 |", "min_ratio_to_best"):
        assert title in shown
