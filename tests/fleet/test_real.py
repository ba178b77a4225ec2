"""A fleet of two real servers: what it answers is what one of them does, and an RL run outlives a member."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tlt_client import Client, SamplingParams
from tlt_grpo.config import Config, Route
from tlt_grpo.log import Line, Step
from tlt_grpo.train import train

from tests.fleet.conftest import NO_KEYS, Fleet, wait_for
from tests.forks import forked
from tests.server.warm import warm_process
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.fleet.front import Beside, Front
from tlt_server.fleet.links import Limits
from tlt_server.process import free_port, running_module

pytestmark = [pytest.mark.server(), pytest.mark.slow]

TARGET = default_paths()[0]
TRL = Path(__file__).parents[2] / "examples/trl/trl_grpo.py"
TEXTS = [problem.prompt for problem in problems(8, seed=9)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=48)
LIMITS = Limits(probe_every=1.0, probe=10.0, call=120.0, patience=60.0)
SMALL: dict[str, Any] = {"prompts": 4, "group": 4, "max_new_tokens": 64, "temperature": 1.0, "steps": 4}


class Real(Fleet):
    """Two servers in place of stand-ins."""

    pids: dict[str, int]
    stack: ExitStack

    def serve(self, name: str) -> None:
        """Starts one."""
        flags, log = ["--max-total-tokens", "4096", "--max-running-requests", "8"], self.folder / f"{name}.log"
        self.urls[name], self.pids[name] = self.stack.enter_context(warm_process(flags, log))
        self.processes[name] = None  # type: ignore[assignment]  # the stack ends it


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("real")
    fleet = Real(folder, LIMITS)
    fleet.pids = {}
    with ExitStack() as stack:
        fleet.stack = stack
        for name in "ab":
            fleet.serve(name)
        fleet.start("a", "b").await_states(a="ready", b="ready")
        yield fleet
        fleet.processes.clear()
        fleet.close()


def test_the_client_takes_a_fleet_for_a_server(two: Real) -> None:
    with Client(two.url) as fleet, Client(two.urls["a"]) as one:
        for problem in problems(4, seed=5):
            assert fleet.generate(problem.prompt, GREEDY).tokens == one.generate(problem.prompt, GREEDY).tokens
        fleet.pause_generation("in_place")
        fleet.update_weights_from_disk(str(TARGET), "again")
        fleet.continue_generation()
        assert fleet.weight_version() == "again" == one.weight_version()
        assert fleet.status().versions is not None
        assert {each["state"] for each in two.seen()["replicas"]} == {"ready"}
        rollouts = fleet.generate_batch([problem.prompt for problem in problems(4, seed=6)], version="again")
        assert {each.weight_version for each in rollouts} == {"again"}
        assert fleet.health()
        fleet.flush_cache()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"text": TEXTS, "sampling_params": {"n": 2, "max_new_tokens": 16}}),
        ("/v1/completions", {"prompt": TEXTS, "n": 2, "max_tokens": 16, "return_token_ids": True}),
    ],
)
def test_a_batch_over_two_is_the_batch_of_one(two: Real, path: str, asked: dict[str, Any]) -> None:
    seeded = {"headers": {"X-TLT-Seed": "77"}, "timeout": 120.0}
    split = two.http.post(path, json=asked, **seeded).raise_for_status()
    assert set(split.headers["X-TLT-Replica"].split(",")) == {"a", "b"}
    whole = httpx.post(two.urls["b"] + path, json=asked, **seeded).raise_for_status()

    def samples(answer: Any) -> list[Any]:
        if isinstance(answer, list):
            return [(each["output_ids"], each["meta_info"]["seed"]) for each in answer]
        return [(each["index"], each["token_ids"]) for each in answer["choices"]] + [answer["usage"]["total_tokens"]]

    assert samples(split.json()) == samples(whole.json())


def rewards(url: str, out: Path, publish: Route = "disk", then: Callable[[], None] = lambda: None) -> list[float]:
    """Of each step of a run; `then` is done in the middle of its third."""
    lines: list[Line] = []

    def heard(line: Line) -> None:
        lines.append(line)
        if isinstance(line, Step) and line.step == 2:
            threading.Timer(0.3, then).start()

    with Client(url) as client:
        train(Config(url=url, model=str(TARGET), out=out, publish=publish, **SMALL), client, heard)
    return [line.reward for line in lines if isinstance(line, Step)]


def trl_rewards(url: str, out: Path, then: Callable[[], None] = lambda: None) -> list[str]:
    """What TRL's trainer says of each step; `then` is done in the middle of the second."""
    flags = ["--url", url, "--model", str(TARGET), "--out", str(out), "--steps", "3", "--prompts", "4", "--group", "4"]
    flags += ["--max-new-tokens", "64", "--learning-rate", "1e-4"]
    out.mkdir()
    run = forked(flags, out / "log", {"TRL_EXPERIMENTAL_SILENCE": "1"}, TRL)
    with Client(url) as client:
        wait_for(lambda: client.weight_version() == "trl 1" or run.poll() is not None, within_s=240)
    threading.Timer(0.3, then).start()
    assert run.wait(240) == 0, (out / "log").read_text()[-3000:]
    return [line for line in (out / "log").read_text().splitlines() if line.startswith("step ")]


def test_trl_goes_on_without_a_member_too_and_another_takes_its_place(two: Real, tmp_path: Path) -> None:
    whole = trl_rewards(two.url, tmp_path / "whole")
    assert len(whole) == 3
    with Client(two.url) as client:
        client.update_weights_from_disk(str(TARGET), "again")

    def kill() -> None:
        os.killpg(two.pids["b"], signal.SIGKILL)

    assert trl_rewards(two.url, tmp_path / "less", kill) == whole
    two.await_states(a="ready", b="quarantined")
    two.serve("b")
    two.join("b")
    with Client(two.url) as client:
        client.update_weights_from_disk(str(TARGET), "default")
    wait_for(lambda: two.states() == {"a": "ready", "b": "ready"}, two.seen, 60)
    assert two.direct("b", "/get_weight_version") == {"weight_version": "default"}


@contextmanager
def behind_a_keeper(two: Real, folder: Path) -> Iterator[str]:
    """A front over the same two servers, whose trainers broadcast to a keeper; its URL. Their own, which would bring
    the servers back to what it knows of, ends."""
    two.stop()
    flags = ["--model-path", str(TARGET), "--folder", str(folder / "kept")]
    with running_module(["tlt_server", "keeper"], flags, folder / "keeper.log", start_timeout=300) as (keeper, _):
        front, port = Front(folder / "state", 1, LIMITS, NO_KEYS, Beside(keeper=keeper)), free_port()
        two.run(front.start("127.0.0.1", port, {name: two.urls[name] for name in "ab"}))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: len(front.fleet.ready()) == 2, within_s=60)
            yield url
        finally:
            two.run(front.close())


def test_a_run_goes_on_without_a_member_and_has_the_same_rewards(two: Real, tmp_path: Path) -> None:
    """Its group outlives the member, too: the keeper is the one rank of it."""
    whole = rewards(two.url, tmp_path / "whole")
    assert len(whole) == SMALL["steps"]
    assert len(set(whole)) > 1, "rewards that are all alike would show nothing"
    with Client(two.url) as client:
        client.update_weights_from_disk(str(TARGET), "again")

    def kill() -> None:
        os.killpg(two.pids["b"], signal.SIGKILL)

    with behind_a_keeper(two, tmp_path) as url:
        assert rewards(url, tmp_path / "less", "broadcast", kill) == whole
        members = httpx.get(f"{url}/tlt/v1/fleet").raise_for_status().json()["replicas"]
        assert {each["name"]: each["state"] for each in members} == {"a": "ready", "b": "quarantined"}
