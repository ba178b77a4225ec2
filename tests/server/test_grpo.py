"""The GRPO trainer against a real server: it learns from what was sampled, and what it publishes is in force."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tlt_client import Client, Load
from tlt_grpo.config import Beside, Config
from tlt_grpo.in_flight import Flight
from tlt_grpo.learning.policy import Policy
from tlt_grpo.log import HeldOut, Line, Step
from tlt_grpo.publishing import Publisher
from tlt_grpo.rollouts import sampling
from tlt_grpo.train import Training, train

from tests.forks import forked
from tests.server.trainer import Trainer
from tlt_server.demo import default_paths
from tlt_server.demo.task import training_problems

pytestmark = pytest.mark.server("eagle-chain")

TARGET = default_paths()[0]
SMALL: dict[str, Any] = {"prompts": 2, "group": 4, "max_new_tokens": 96, "learning_rate": 1e-4}


@pytest.fixture(autouse=True)
def restored(url: str) -> Iterator[None]:
    """The server's target is as at the start again when a test is over."""
    yield
    with Client(url) as client:
        client.update_weights_from_disk(str(TARGET), "default")


def config(url: str, out: Path, **settings: Any) -> Config:
    return Config(url=url, model=str(TARGET), out=out, **(SMALL | settings))


def target_of(client: Client) -> int:
    return client.status().versions.target.version


def test_a_run(url: str, tmp_path: Path) -> None:
    """Each step is sampled by exactly the policy of before, as the server's log-probabilities say, and published."""
    lines: list[Line] = []
    with Client(url) as client:
        before = target_of(client)
        train(config(url, tmp_path, steps=3, held_out=8, updates=2), client, lines.append)
        assert target_of(client) == before + 4
    first, *steps, last = lines
    assert isinstance(first, HeldOut)
    assert isinstance(last, HeldOut)
    assert (first.step, last.step, first.problems) == (0, 3, 8)
    for number, step in enumerate(steps, start=1):
        assert isinstance(step, Step)
        assert (step.step, step.weight_version, step.target_versions) == (number, str(number - 1), (before + number,))
        assert step.failed_requests == 0
        assert step.length_mean <= step.length_max <= 96
        assert step.accept_length is not None
        assert 1 < step.accept_length <= 4
        if step.learnt is not None:
            assert step.learnt.mismatch < 1e-3
    assert any(isinstance(step, Step) and step.learnt is not None for step in steps)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["policy-3", "state.pt"]


@pytest.mark.parametrize("route", ["tensor", "broadcast"])
def test_other_routes_put_the_same_policy_in_force(route: Any, url: str, tmp_path: Path) -> None:
    """What is sampled is what was learnt, as log-probabilities say; the checkpoint at the end is in force."""
    lines: list[Line] = []
    trainer = Trainer(url)
    with Client(url) as client:
        before = target_of(client)
        last = train(config(url, tmp_path, steps=2, publish=route), client, lines.append)
        assert target_of(client) == before + 3
        found = trainer.checksums()
        client.update_weights_from_disk(str(last))
        assert trainer.checksums() == found
    trainer.close()
    for step in lines:
        assert isinstance(step, Step)
        assert step.step_s >= step.rollout_s + step.learn_s + step.publish_s
        assert step.learnt is None or step.learnt.mismatch < 1e-3


@pytest.mark.parametrize(("mode", "oldest"), [("one_step_off", 1), ("partial", 3)])
def test_rollouts_in_flight_outlast_publications(mode: Any, oldest: int, url: str, tmp_path: Path) -> None:
    """Each token is said to be of the weights that sampled it: where those are the newest, it has their probability."""
    lines: list[Line] = []
    with Client(url) as client:
        before = target_of(client)
        train(config(url, tmp_path, steps=4, rollouts=mode, publish="tensor"), client, lines.append)
        assert target_of(client) == before + 5
        assert client.load() == Load(0, 0)
    steps = [line for line in lines if isinstance(line, Step)]
    assert [step.responses for step in steps] == [8] * 4
    assert steps[0].age_max == 0
    assert 1 <= max(step.age_max for step in steps) <= oldest
    assert all(step.failed_requests == 0 and step.too_old == 0 for step in steps)
    assert all(step.learnt is None or step.learnt.mismatch < 1e-3 for step in steps)


def test_what_is_in_flight_goes_on_where_it_was_aborted(url: str) -> None:
    (problem,) = training_problems(1, seed=1)
    params = [sampling(1.0, 96, seed) for seed in range(4)]
    with Client(url) as client, Flight(client, 4) as flight:
        prompt = tuple(Policy(config(url, Path())).tokens(problem.prompt))
        undisturbed = client.generate_batch([prompt] * 4, params)
        flight.ask(problem, prompt, params)
        wait_until(lambda: client.load().running > 0)
        client.abort_all()
        batch = flight.take(1)
        assert [each.tokens for each in batch.sampled.all] == [each.tokens for each in undisturbed]
        assert batch.sampled.failed > 0
        assert batch.problems == [problem] * 4
        flight.ask(problem, prompt, params)
        wait_until(lambda: client.load().running > 0)
    with Client(url) as client:
        wait_until(lambda: client.load() == Load(0, 0))


def test_a_server_whose_memory_is_lent_has_the_policy_again(url: str, tmp_path: Path) -> None:
    lines: list[Line] = []
    with Client(url) as client:
        before = client.events()[-1].number
        train(config(url, tmp_path, steps=2, offload=True, publish="tensor"), client, lines.append)
        kinds = [event.kind for event in client.events(before)]
    assert kinds.count("memory_resumed") == 2 * kinds.count("target_published") // 3 == 2
    for step in lines:
        assert isinstance(step, Step)
        assert step.offload_s > 0
        assert step.learnt is None or step.learnt.mismatch < 1e-3


@pytest.fixture
def asked() -> Iterator[tuple[str, list[Any]]]:
    """The URL of a drafter trainer that has nothing to learn from, and what it is asked."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer = b'{"steps": 2, "seconds": 0.1, "published": 0, "active": 0, "waits_for": "waiting for features"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("beside", ["publish", "learn"])
def test_a_drafter_trainer_is_asked_in_each_step(
    beside: Beside, url: str, asked: tuple[str, list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, bodies = asked
    lines: list[Line] = []
    with Client(url) as client:
        drafter = {"drafter_trainer": trainer, "drafter_steps": 3, "drafter_judged_every": 2, "drafter_beside": beside}
        train(config(url, tmp_path, steps=2, **drafter), client, lines.append)
    assert {path for path, _ in bodies} == {"/tlt/v1/train/steps"}
    assert [(body["steps"], body["until"]) for _, body in bodies] == [(3, "taken"), (0, "judged"), (3, "taken")]
    assert [line.drafter_steps for line in lines if isinstance(line, Step)] == [2, 2]
    assert "took 2 of 3 steps, waiting for features" in caplog.text


def test_a_drafter_trainer_that_is_not_there_holds_nothing_up(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[Line] = []
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with Client(url) as client:
        train(config(url, tmp_path, steps=1, drafter_trainer=nobody), client, lines.append)
    assert [line.drafter_steps for line in lines if isinstance(line, Step)] == [0]
    assert f"the drafter stays as it is: its trainer at {nobody}: " in caplog.text


def test_a_run_that_is_resumed_goes_where_one_goes_that_was_not_broken_off(url: str, tmp_path: Path) -> None:
    """But for the server's last bits, which depend on what else was in a batch: that they are all, without a server, is
    among the trainer's own tests."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    lines: list[Line] = []
    with Client(url) as client:
        last = train(config(url, whole, steps=2), client, lambda _: None)
        train(config(url, broken, steps=1), client, lines.append)
        resumed = train(config(url, broken, steps=2), client, lines.append, resume=True)
    assert [line.step for line in lines] == [1, 2]
    start, one, other = (load_file(folder / "model.safetensors") for folder in (TARGET, last, resumed))
    apart = sum((one[name] - other[name]).square().sum() for name in start) ** 0.5
    moved = sum((one[name] - start[name].float()).square().sum() for name in start) ** 0.5
    assert moved > 0
    assert apart < moved / 10


def test_what_is_in_force_at_the_end_is_what_lies_on_disk(url: str, tmp_path: Path) -> None:
    trainer = Trainer(url)
    with Client(url) as client:
        train(config(url, tmp_path, steps=1), client, lambda _: None)
        learnt = trainer.checksums()
        client.update_weights_from_disk(str(TARGET))
        assert trainer.checksums() != learnt
        client.update_weights_from_disk(str(tmp_path / "policy-1"))
        assert trainer.checksums() == learnt
    trainer.close()


@pytest.fixture
def training(url: str, tmp_path: Path) -> Iterator[Training]:
    settings = config(url, tmp_path)
    with Client(url) as client:
        policy = Policy(settings)
        training = Training(settings, client, policy, Publisher(client, tmp_path))
        training.publisher.publish(policy, "0")
        yield training


def test_rollouts_that_somebody_aborts_are_sampled_again(training: Training) -> None:
    def abort() -> None:
        wait_until(lambda: training.client.load().running > 0)
        training.client.abort_all()

    aborting = threading.Thread(target=abort)
    aborting.start()
    step = training.step(1, training_problems(4, seed=1))
    aborting.join()
    assert step.failed_requests > 0
    assert step.tokens > 0


def test_a_server_that_lost_the_policy_is_sent_it_again(training: Training) -> None:
    training.client.update_weights_from_disk(str(TARGET), "somebody else's")
    step = training.step(1, training_problems(2, seed=1))
    assert (step.weight_version, step.failed_requests) == ("0", 0)


def test_an_interrupt_ends_it_and_its_requests(url: str, tmp_path: Path) -> None:
    flags, log = ["--url", url, "--model", str(TARGET), "--out", str(tmp_path / "out")], tmp_path / "log"
    with Client(url) as client:
        run = forked(flags, log, program="tlt_grpo")
        wait_until(lambda: client.load().running > 0)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        (line,) = log.read_text().splitlines()
        assert "stopped" in line
        wait_until(lambda: client.load() == Load(0, 0))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
