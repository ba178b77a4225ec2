"""The GRPO trainer against a real server: it learns from what was sampled, and what it publishes is in force."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tlt_client import Client, Load
from tlt_grpo.config import Config
from tlt_grpo.learning.policy import Policy
from tlt_grpo.log import HeldOut, Line, Step
from tlt_grpo.publishing import Publisher
from tlt_grpo.train import Training, train

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
    command = [sys.executable, "-m", "tlt_grpo", "--url", url, "--model", str(TARGET), "--out", str(tmp_path)]
    with Client(url) as client:
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: client.load().running > 0)
        os.kill(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=30)
        assert (run.returncode, said.count("\n")) == (130, 1), said
        assert "stopped" in said
        wait_until(lambda: client.load() == Load(0, 0))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
