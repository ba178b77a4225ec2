"""Benchmarks of hot reload: what they push, compare, measure and show; `make bench SMOKE=1` runs them."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tlt_client import DrafterUpdate

from benchmarks.lib import divergences
from benchmarks.lib.command import main
from benchmarks.lib.reload import pushing, shown, streams
from benchmarks.lib.reload.leaks import held, leak_figures
from benchmarks.lib.reload.steps import Span
from benchmarks.lib.reload.streams import Round, Streams, Verdict, beside, judged
from benchmarks.lib.reload.weights import noisy, shuffled, tensors_of
from benchmarks.lib.servers import Server
from benchmarks.lib.sides import Side, Site
from tests.benchmarks.test_tables import rows
from tests.forks import FORKS
from tests.wire.children import receive
from tests.wire.ends import HELLO
from tlt_server import results
from tlt_server.config import Arm
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.reference import Reference
from tlt_server.engine.decode.steplog import StepLog
from tlt_server.results import Figures, Result

TARGET, DRAFTER = default_paths()


# -- weights --


def test_noise_leaves_zeros_and_vectors_alone(tmp_path: Path) -> None:
    """Zeros are what makes a model in the shape of a larger one the same model."""
    (tmp_path / "start").mkdir()
    weight = torch.zeros(8, 8, dtype=torch.bfloat16)
    weight[:4] = 1 + torch.arange(32).view(4, 8)
    save_file({"weight": weight, "norm": torch.ones(8)}, tmp_path / "start/model-00001.safetensors")
    moved = tensors_of(noisy(tmp_path / "start", tmp_path / "noisy", seed=1))
    assert moved["weight"].dtype == torch.bfloat16
    assert not moved["weight"][4:].any()
    assert (moved["weight"][:4] != weight[:4]).float().mean() > 0.5
    assert torch.equal(moved["norm"], torch.ones(8))
    assert not torch.equal(tensors_of(shuffled(tmp_path / "start", tmp_path / "random", 2))["weight"][4:], weight[4:])


def test_both_kinds_of_drafter_can_be_served() -> None:
    for drafter, algorithm in ((DRAFTER, "EAGLE"), (eagle3_path(), "EAGLE3")):
        site = Site(TARGET, drafter, Path("logs"), [16], 1024)
        _, flags, _ = site.command(Side("a", Arm(3, 1, 4)))
        assert flags[flags.index("--speculative-algorithm") + 1] == algorithm


# -- streams --


def test_streams_run_for_as_long_as_the_work() -> None:
    three, given = Event(), count(1)

    def stream() -> int:
        if (number := next(given)) == 3:
            three.set()
        return number

    rounds = beside(stream, lambda: assert_set(three))
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 3


def assert_set(event: Event) -> None:
    assert event.wait(10)


def test_work_that_fails_ends_the_streams() -> None:
    with pytest.raises(ZeroDivisionError):
        beside(lambda: None, lambda: 1 // 0)


def test_a_round_finds_its_own_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with closing(StepLog(path)) as log:
        log.note(True, 1, {"r1-0": 9})
        since = path.stat().st_size
        log.note(True, 1, {"r1-0": 1, "r1-1": 2})
        log.note(True, 2, {"r2-0": 3})
    server = Server("http://nowhere", 0)
    with closing(server.http):
        steps = Streams(server, [], 8, path).steps_of(Round("r1", since, Span(0, 1), []))
    assert [step.tokens for step in steps] == [{"0": 1, "1": 2}, {}]


def test_every_difference_is_a_mismatch_in_float32() -> None:
    prompts, expected = [(1, 2), (3,)], [(4, 5, 6), (7, 8, 9)]
    given = [[(4, 5, 6), (7, 8, 9)], [(4, 5, 7), ()]]  # a failed request gave nothing
    assert judged(pytest.fail, prompts, expected, given) == Verdict(responses=3, mismatched=1, tied=0)
    assert Verdict(responses=8, mismatched=1, tied=2).tie_rate == 0.25


def test_a_tie_is_no_mismatch_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tokens that the embedded target finds likeliest after a prompt, made as near as a tie, or left apart."""
    monkeypatch.setattr(streams, "has_gpu", lambda: True)
    prompt, target = (40, 41, 42), Reference(TARGET)
    best, second = target.logits([prompt])[0].topk(2).indices.tolist()
    expected, given = [(best, 7)], [[(second, 8)], [(second, 9)], [(best, 7)]]
    apart = judged(lambda: target, [prompt], expected, given)
    monkeypatch.setattr(divergences, "TIE_ULPS", 1e9)
    tied = judged(lambda: target, [prompt], expected, given)
    assert (apart.responses, apart.mismatched + apart.tied) == (3, 2)
    assert tied == Verdict(responses=3, mismatched=0, tied=2)


def test_a_leak_is_what_grew() -> None:
    group = os.getpgid(0)
    before = held(group)
    files = [open("/dev/null") for _ in range(3)]  # noqa: SIM115
    after = held(group)
    for file in files:
        file.close()
    figures = leak_figures(replace_rss(before, 100.0), replace_rss(after, 103.5))
    assert figures["leaked_file_handles"] >= 3
    assert figures["leaked_rss_mb"] == 3.5
    assert figures["memory_leaked_mb"] == pytest.approx(3.5 + figures["leaked_shm_mb"])


def replace_rss(of: Any, megabytes: float) -> Any:
    return of._replace(rss_mb=megabytes)


# -- what is shown --

SWAP: Figures = {
    **dict.fromkeys(("swaps", "streams", "outputs", "recoveries"), 40),
    **dict.fromkeys(("failed_requests", "mismatched_outputs", "leaked_file_handles"), 0),
    **dict.fromkeys(("tie_rate", "tie_rate_control", "tie_rate_undisturbed"), 0.025),
    **dict.fromkeys(("leaked_gpu_mb", "leaked_rss_mb", "leaked_shm_mb"), 0.5),
    **{"step_ms_median": 9.0, "step_ms_p99": 12.5, "worst_step_ms_p99": 15.25, "lost_ms_p50": 4.5, "live_s_p50": 0.375},
    **{"recovery_s": 0.75, "recovery_s_max": 1.25},
    **{"accept_length_running_good_first_16_fresh": 3.0, "accept_length_running_good_first_16": 2.94},
    "cache_cost_percent_running_good_first_16": 2.0,
}


def result(name: str, figures: Figures) -> Result:
    return results.measured_here(name, ["python", "-m", "benchmarks", name], figures)


def test_swaps_are_shown_against_their_bars() -> None:
    text = shown.swap(result("swap", SWAP))
    cells = {row[0]: row[1:] for row in rows(text)}
    assert cells["a step beside a swap, p99 of all, ms"] == ["12.50", "15.50"]
    assert cells["each swap's longest step, p99, ms"] == ["15.25", "15.50"]
    assert cells["requests that failed"] == ["0", "0"]
    assert cells["running requests"] == ["good to good", "first 16 tokens", "3.00", "2.94", "2.00"]
    assert "rolled back by itself after 0.75 s" in text


def test_publications_are_shown_by_route() -> None:
    case = "eagle3_tp2_disk"
    figures: Figures = {"requests": 10, "failed_requests": 0, f"publications_{case}": 100}
    figures |= {f"unexpected_checksums_{case}": 0, f"publication_ms_p50_{case}": 12.5}
    figures |= {f"accept_length_before_{case}": 3.25, f"accept_length_after_{case}": 3.25}
    *_, row = rows(shown.publications(result("publications", figures)))
    assert row == ["EAGLE-3", "2", "disk", "100", "0", "3.25", "3.25", "12.50"]


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("swap", ["--swaps", "0"], "must be a whole number"),
        ("swap", ["--by", "pigeon"], "invalid choice"),
        ("swap", ["--shape", "qwen2.5-7b"], "needs a GPU, and there is none"),
        ("publications", ["--routes", "post"], "invalid choice"),
        ("publications", ["--ranks", "0"], "must be a whole number"),
    ],
)
def test_bad_input_is_said_at_once(
    name: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = import_module(f"benchmarks.commands.reload.{name}")
    with pytest.raises(SystemExit, match="2"):
        main(name, None, flags, command.measured, str, command.flags())
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_trainer_of_its_own_process_sends_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a server's receiver; the first byte is timed there, and the process ends with its `with`."""
    monkeypatch.setattr(pushing, "_swapped", lambda events, version, sent: (version, sent))
    began = time.monotonic()
    with pushing.ByZmq(TARGET) as push, receiving(push, tmp_path) as heard:
        version, sent = push(None, DRAFTER)
        ready = heard(DrafterUpdate)
        process = push._process
    assert version == ready.version == 1
    assert began < sent < time.monotonic()
    again, start = load_file(ready.path), load_file(DRAFTER / "model.safetensors")
    assert all(torch.equal(again[name], start[name]) for name in start)
    assert process.exitcode == 0


@contextmanager
def receiving(push: pushing.ByZmq, folder: Path) -> Iterator[Callable[[type[Any]], Any]]:
    """A server's receiver; gives what hears a message of a kind from it."""
    ours, theirs = FORKS.Pipe()
    hello = msgspec.structs.replace(HELLO, model=push._model)
    receiver = FORKS.Process(target=receive, args=(push.flags[1], theirs, hello, folder))
    receiver.start()

    def heard(kind: type[Any]) -> Any:
        while ours.poll(30):
            if isinstance(told := ours.recv(), kind):
                return told
        raise AssertionError(f"no {kind}")

    try:
        yield heard
    finally:
        receiver.kill()
        receiver.join()
        ours.close()
        theirs.close()
