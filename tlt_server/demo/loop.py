"""The demo's second part: the whole loop. An RL trainer, the rollout server and the drafter trainer, each a process.

1. start the drafter trainer, and a server that follows it, with a drafter that has learnt nothing
2. start tlt-grpo, which samples rollouts, learns from them and publishes the target, step by step
3. meanwhile the drafter learns from the server's hidden states, and each better one takes over between two decode steps
4. show what the three say; at the end count what came of it
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.console import Console
from tlt_client import Client, Event
from tlt_client.errors import TltClientError
from tlt_grpo.log import Step, read

from tlt_server.demo import default_paths
from tlt_server.demo.live import Now, View
from tlt_server.errors import ServerFailed
from tlt_server.process import await_answer, free_port, running, running_server, tail
from tlt_server.results import Figures

SEED = 2026
LEAST_TARGETS, LEAST_DRAFTERS = 5, 3
LOOK_EVERY_S = 1.0
# The server has one core; what learns has the other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

DRAFTER_TRAINER = Path(__file__).with_name("drafter_trainer.toml")
# A high rate, so that a few steps move the policy.
GRPO = {"learning-rate": "1e-4", "seed": str(SEED)}


class Loop(NamedTuple):
    """What runs, and where to ask it."""

    url: str
    client: Client
    trainer: "subprocess.Popen[bytes]"
    trainer_url: str
    folder: Path
    """With the log of each process, `train.log`, `server.log` and `grpo.log`, and what tlt-grpo writes in `grpo`."""


def run(steps: int, console: Console) -> Figures:
    """Runs the loop for so many RL steps and shows it. ServerFailed: one of the three processes ended early."""
    began = time.monotonic()
    console.print("starting the drafter trainer, and a server that follows it …")
    with tempfile.TemporaryDirectory(prefix="tlt-demo-") as folder, _loop(Path(folder)) as loop:
        done = _watch(loop, steps, console)
        versions = loop.client.status().versions
        figures = count(done, versions.target.version if versions else 0, loop.client.events())
    return figures | {"loop_seconds": time.monotonic() - began}


@contextmanager
def _loop(folder: Path) -> Iterator[Loop]:
    control, port, log = f"ipc://{folder}/control", free_port(), folder / "train.log"
    settings = ["--tlt-config", str(DRAFTER_TRAINER), "--folder", str(folder / "drafters")]
    train = ["tlt_server", "train", *settings, "--listen", control, "--port", str(port)]
    serve = ["--drafter", "auto", "--trainer", control, "--random-seed", str(SEED)]
    with running(train, log, environment=ONE_THREAD) as trainer, running_server(serve, folder / "server.log") as url:
        trainer_url = f"http://127.0.0.1:{port}/tlt/v1/train/status"
        await_answer(trainer, trainer_url, log, 60)
        with Client(url) as client:
            yield Loop(url, client, trainer, trainer_url, folder)


def _watch(loop: Loop, steps: int, console: Console) -> list[Step]:
    """Runs the RL trainer, and shows how all three stand until it is done."""
    out, log = loop.folder / "grpo", loop.folder / "grpo.log"
    flags = {"url": loop.url, "model": str(default_paths()[0]), "out": str(out), "steps": str(steps)} | GRPO
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with running(["tlt_grpo", *words], log, environment=ONE_THREAD) as grpo, View(console, steps) as view:
        while grpo.poll() is None:
            if loop.trainer.poll() is not None:
                raise ServerFailed(f"the drafter trainer ended:\n{tail(loop.folder / 'train.log')}")
            view.show([row_of(step) for step in _steps(out)], _look(loop))
            time.sleep(LOOK_EVERY_S)
        view.show([row_of(step) for step in _steps(out)], _look(loop))
    if grpo.returncode:
        raise ServerFailed(f"tlt-grpo ended with exit code {grpo.returncode}:\n{tail(log)}")
    return _steps(out)


def _steps(out: Path) -> list[Step]:
    log = out / "log.jsonl"
    return [line for line in read(log) if isinstance(line, Step)] if log.exists() else []


def _look(loop: Loop) -> Now | None:
    """How server and drafter trainer stand; None where one of them is too busy to say."""
    try:
        trainer = httpx.get(loop.trainer_url, timeout=5).raise_for_status().json()
        return Now(loop.client.status(), trainer["state"], trainer["steps"], trainer["tokens_received"])
    except (httpx.HTTPError, TltClientError):
        return None


def count(steps: Sequence[Step], published: int, events: Sequence[Event]) -> Figures:
    """The figures of a run, and those of each step, which `rows_of` finds again. published: targets, by the server."""
    failed = sum(step.failed_requests for step in steps)
    figures: Figures = {
        "requests": sum(step.responses for step in steps) + failed,
        "failed_requests": failed,
        "rl_steps": len(steps),
        "target_versions": published,
        "drafter_versions_live": len({each.detail["version"] for each in events if each.kind == "drafter_swapped"}),
    }
    for step in steps:
        figures |= {f"{name}_step_{step.step}": value for name, value in row_of(step).items()}
    return figures


def row_of(step: Step) -> Figures:
    """What is shown of a step. One whose rollouts were decoded plainly has an accept length of 1: tokens per pass."""
    return {
        "reward": step.reward,
        "response_length": step.length_mean,
        "accept_length": step.accept_length or 1.0,
        "tokens_per_s": step.tokens_per_s,
        "target_version": max(step.target_versions, default=0),
        "drafter_version": max(step.drafter_versions, default=0),
    }


def faults(figures: Figures) -> list[str]:
    """What went wrong, a line each."""
    found = {
        f"{figures['failed_requests']} of {figures['requests']} requests failed": figures["failed_requests"] > 0,
        **{
            f"{name} is {figures[name]}, of at least {least}": figures[name] < least
            for name, least in (("target_versions", LEAST_TARGETS), ("drafter_versions_live", LEAST_DRAFTERS))
        },
    }
    return [line for line, wrong in found.items() if wrong]
