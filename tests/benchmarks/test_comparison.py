"""The harness: what it reads off a server's log, how sides are started, and what it computes of windows."""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as entrance
from benchmarks.commands.speed import accept_length, context, speedup
from benchmarks.lib import command
from benchmarks.lib.command import Models
from benchmarks.lib.comparison import PLAIN, Measured, lagging, measure_group, merged, side_figures
from benchmarks.lib.decoding import Load, Window, steady, windows
from benchmarks.lib.sides import Side, SideServer, Site, check_memory, name_of
from benchmarks.lib.strategies import fixed, learning
from tlt_server.config import Arm
from tlt_server.demo import default_paths
from tlt_server.errors import ConfigError
from tlt_server.process import free_port
from tlt_server.results import Figures, read

TARGET, DRAFTER = default_paths()
LOG = """\
[2026-11-20 16:36:49] Decode batch, #running-req: 128, #token: 83940, token usage: 0.70, cuda graph: True, gen \
throughput (token/s): 17530.17, #queue-req: 0
Prefill batch, #new-seq: 32, #new-token: 2047, #cached-token: 1, token usage: 0.03, input throughput (token/s): 767.40
Decode batch, #running-req: 32, #token: 21888, token usage: 0.18, accept len: 4.00, accept rate: 0.20, cuda graph: \
False, gen throughput (token/s): 5504.09, #queue-req: 0
Decode batch, #running-req: 8, #token: 537, token usage: 0.21, accept len: 1.94, accept rate: 0.94, cpu graph: False, \
gen throughput (token/s): 330.12, #queue-req: 0
"""


def site(**changes: object) -> Site:
    made = Site(TARGET, DRAFTER, logs=Path(), batches=(1, 8), max_tokens=4096)
    return replace(made, **changes)


def test_the_log_is_read() -> None:
    assert windows(LOG) == [
        Window(128, 83940, 17530.17, 1.0, graph=True),
        Window(32, 21888, 5504.09, 4.0, graph=False),
        Window(8, 537, 330.12, 1.94, graph=False),
    ]


def test_a_steps_time_follows_from_rate_and_accept_length() -> None:
    assert Window(32, 0, 6400.0, 4.0, graph=True).step_ms == pytest.approx(20)


def rates(*values: float, batch: int = 4, accepted: float = 1.0) -> list[Window]:
    return [Window(batch, 0, value, accepted, graph=True) for value in values]


@given(st.lists(st.integers(1, 4), max_size=30))
def test_only_full_batches_between_the_first_and_the_last_count(sizes: Sequence[int]) -> None:
    found = [Window(batch, place, 1.0, 1.0, graph=True) for place, batch in enumerate(sizes)]
    full = [place for place, batch in enumerate(sizes) if batch == 4]
    assert [window.cached for window in steady(found, 4)] == full[1:-1]


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that slows down in the second round slows both sides: the ratio stands."""
    chain, load = Side("chain_3", Arm(3, 1, 4)), Load("batch_4", [(1,)] * 4, 64)
    plain = [rates(100, 100), rates(50, 50), rates(100, 100)]
    drafted = [rates(200, 200, accepted=3), rates(100, 100, accepted=3), rates(220, 220, accepted=3)]
    group = Measured([Side(PLAIN), chain], {(PLAIN, load.name): plain, ("chain_3", load.name): drafted}, 6, 0)
    figures = side_figures([group], [load])
    assert figures["speedup_chain_3_batch_4"] == 2
    assert figures["speedup_min_chain_3_batch_4"] == 2
    assert figures["speedup_max_chain_3_batch_4"] == pytest.approx(2.2)
    assert figures["break_even_chain_3_batch_4"] == 1.5
    assert figures["tokens_per_s_plain_batch_4"] == 100
    assert figures["windows_chain_3_batch_4"] == 6


def test_a_round_without_a_window_gives_no_ratio() -> None:
    chain, load = Side("chain_3", Arm(3, 1, 4)), Load("batch_4", [(1,)] * 4, 64)
    of = {(PLAIN, load.name): [rates(100), []], ("chain_3", load.name): [[], rates(300)]}
    figures = side_figures([Measured([Side(PLAIN), chain], of, 4, 0)], [load])
    assert "speedup_chain_3_batch_4" not in figures


def test_plain_figures_are_those_of_the_first_group() -> None:
    load = Load("batch_4", [(1,)] * 4, 64)
    groups = [Measured([Side(PLAIN)], {(PLAIN, load.name): [rates(rate)]}, 1, 0) for rate in (100, 50)]
    assert side_figures(groups, [load])["tokens_per_s_plain_batch_4"] == 100


def test_groups_that_stood_apart_are_compared() -> None:
    chain, load = Side("chain_3", Arm(3, 1, 4)), Load("batch_4", [(1,)] * 4, 64)
    apart = [
        Measured([Side(PLAIN)], {(PLAIN, load.name): [rates(100)]}, 4, 1),
        Measured([chain], {(chain.name, load.name): [rates(150)]}, 4, 0),
    ]
    both = merged(apart)
    assert both.speedups("chain_3", load.name) == [1.5]
    assert (both.requests, both.failed) == (8, 1)


def test_sides_that_lag_draft_and_do_not_learn() -> None:
    """By their medians so far; what was left out of a round, or gave no window, says nothing."""
    arms, load = (Arm(1, 1, 2), Arm(3, 1, 4)), Load("batch_4", [(1,)] * 4, 64)
    of = {
        PLAIN: [rates(100)] * 3,
        "off": [rates(99)] * 3,
        "chain_1": [rates(185), [], []],
        "chain_3": [rates(200), rates(200), rates(150)],
        "paper": [rates(20)] * 3,
        "upstream_adaptive": [rates(187), rates(100), rates(300)],
    }
    windows = {(name, load.name): found for name, found in of.items()}
    peer = Side("upstream_adaptive", arms[1], upstream=True)
    group = [Side(PLAIN), *fixed(dict.fromkeys(arms, 64), 64), *learning(arms), peer]
    assert lagging(windows, group, load) == {"chain_1"}
    assert [side.name for side in group if side.remembers] == ["bandit"]
    assert lagging({}, group, load) == set()


def test_a_server_that_failed_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "plain.log"
    log.write_text("out of memory")
    gone = subprocess.Popen(["sleep", "60"], start_new_session=True)
    server = SideServer(f"http://127.0.0.1:{free_port()}", 0, log=log, pid=gone.pid)
    loads = [Load("batch_1", [(1,)], 64), Load("batch_2", [(1,), (2,)], 64)]
    try:
        one, group = measure_group([Side(PLAIN)], {PLAIN: server}, loads, 2, lambda side, load: None)
    finally:
        server.http.close()
        gone.kill()
        gone.wait()
    assert (group.requests, group.failed) == (1, 1)
    assert one.windows[PLAIN, "batch_2"] == [[]]
    assert group.windows[PLAIN, "batch_2"] == [[], []]
    assert side_figures([group], loads) == {}


def test_the_best_arm_is_ours_or_upstreams() -> None:
    figures = {
        "speedup_chain_3_batch_8": 1.5,
        "speedup_tree_5_4_8_batch_8": 1.7,
        "speedup_max_chain_3_batch_8": 9,
        "speedup_upstream_chain_3_batch_8": 1.6,
        "speedup_upstream_adaptive_batch_8": 2.0,
        "speedup_chain_3_batch_128": 0.5,
    }
    best = speedup.best_figures(figures, [8, 128])
    assert best == {"speedup_batch_8": 1.7, "speedup_upstream_batch_8": 1.6, "speedup_batch_128": 0.5}


def test_a_run_that_is_broken_off_has_kept_its_whole_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rounds(*_: object) -> Iterator[Figures]:
        yield {"rounds": 1}
        yield {"rounds": 2}
        raise KeyboardInterrupt

    def none(*_: object) -> Figures:
        raise KeyboardInterrupt

    said = {}
    for measured in (none, rounds):
        file = tmp_path / f"{measured.__name__}.json"
        with pytest.raises(SystemExit) as exit_:
            command.main("strategy", None, ["--shape", "embedded", "--json", str(file)], measured, str)
        assert exit_.value.code == 130
        said[measured.__name__] = capsys.readouterr().err
    assert read(tmp_path / "rounds.json").figures == {"rounds": 2}
    assert said == {
        "none": "strategy: interrupted; nothing was kept\n",
        "rounds": f"strategy: interrupted; {tmp_path / 'rounds.json'} has its whole rounds\n",
    }


@pytest.mark.parametrize(
    "groups",
    [
        speedup.gpu_groups(upstream=True),
        speedup.gpu_groups(upstream=False),
        speedup.cpu_groups(),
        [accept_length.sides(accept_length.GPU_PAIRS)],
        [accept_length.sides(accept_length.CPU_PAIRS)],
        [context.sides([1, 8])],
    ],
)
def test_every_group_has_its_own_plain_side(groups: Sequence[Sequence[Side]]) -> None:
    for group in groups:
        assert [side.name for side in group].count(PLAIN) == 1
    names = [side.name for group in groups for side in group if side.name != PLAIN]
    assert len(set(names)) == len(names)


def test_peers_get_the_same_flags_as_ours() -> None:
    ours = Side("chain_3", Arm(3, 1, 4), accept_length=3)
    theirs = replace(ours, upstream=True)
    module, flags, environment = site(upstream=Path("/up")).command(ours)
    peer, peer_flags, peer_environment = site(upstream=Path("/up")).command(theirs)
    assert (module, peer) == (["tlt_server", "serve"], ["sglang.launch_server"])
    assert flags == peer_flags
    assert environment == {
        "SGLANG_SIMULATE_ACC_LEN": "3",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    assert peer_environment.pop("PYTHONPATH").startswith("/up")
    assert peer_environment == environment


def test_arms_have_names() -> None:
    assert [name_of(Arm(3, 1, 4)), name_of(Arm(5, 4, 16))] == ["chain_3", "tree_5_4_16"]


def test_too_little_memory_is_said_before_anything_starts() -> None:
    check_memory([Side(PLAIN)], site())
    with pytest.raises(ConfigError, match=r"2 servers of .* need .* GB.* are free.*smaller --shape"):
        check_memory([Side(PLAIN), Side("chain_3", Arm(3, 1, 4))], site(max_tokens=1 << 34))


def test_prompts_differ_and_longer_ones_begin_as_shorter_ones() -> None:
    models = Models(TARGET, DRAFTER)
    asked, short, long = models.prompts(4), models.prompts(4, 64), models.prompts(4, 256)
    assert [len(each) for each in short + long] == [64] * 4 + [256] * 4
    for problem, some, more in zip(asked, short, long, strict=True):
        assert some[-len(problem) :] == more[-len(problem) :] == problem
        assert some[: -len(problem)] == more[: 64 - len(problem)]
    assert len({each[:24] for each in short}) == 4


def test_a_result_that_could_not_be_written_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command.parser("speedup", None).parse_args(["--json", "/proc/here/result.json"])
    with pytest.raises(SystemExit, match="2"):
        command.run("speedup", arguments, lambda: pytest.fail("it measured"))
    assert capsys.readouterr().err.startswith("speedup: --json /proc/here/result.json: ")


@pytest.mark.slow
@pytest.mark.parametrize(  # every mistake, and every table: they share what looks for mistakes
    ("name", "flags", "message"),
    [
        ("speedup", ["--shape", "qwen3"], "shape qwen3: not known. Choose one of"),
        ("accept_length", ["--shape", "qwen2.5-7b"], "--shape qwen2.5-7b needs a GPU, and there is none"),
        ("context", ["--model-path", "there"], "--model-path and --drafter go together"),
        ("speedup", ["--model-path", "there", "--drafter", "here"], "no such folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    name: str, flags: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "result.json"
    with pytest.raises(SystemExit, match="2"):
        entrance.main([name, "--json", str(kept), *flags])
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not kept.exists()
