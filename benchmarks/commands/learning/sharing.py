"""What does a drafter trainer cost the rollouts whose GPU it uses, and how much does it learn meanwhile?

    python -m benchmarks sharing --json benchmarks/results/sharing.h200.json

A server and `tlt-server train` on one GPU, with `[spot] slowdown` as its budget. Batches of long responses are decoded
by one arm, wave after wave: in turns without training and beside it. A slow-down is what the mean decode step takes
longer beside it than before and after, by the server's log of steps. Trained tokens are those that training steps
learnt from in that time. Before all, the trainer has the GPU to itself, as between the rollouts of an RL step.
"""

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import nan
from pathlib import Path
from statistics import fmean, median

import httpx
from tlt_client import AsyncClient, Client

from benchmarks.lib import command, tables
from benchmarks.lib.command import EMBEDDED, Models
from benchmarks.lib.decoding import Load
from benchmarks.lib.draining import decode_steps
from benchmarks.lib.servers import logging_steps
from benchmarks.lib.sides import Side, SideServer, Site, awake, side_by_side
from benchmarks.lib.step.serving import PADDED
from benchmarks.lib.training.trainers import training
from tlt_server.config import Arm
from tlt_server.engine.decode.steplog import read_steps
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/trainer", "tlt_server/link", "tlt_server/strategy")
ARM = Arm(3, 1, 4)
TOKENS = 512
BUDGETS = (0.03, 0.1)
ROUNDS = 8
QUIET_S, SETTLING_S, BESIDE_S = 3.0, 2.0, 5.0
"""In each round, of decoding without training; of training until it counts, for its first step need not wait; and
beside it. Short, for other work on the host moves step times within seconds, by more than training does."""
STEPS_ALONE = 20
"""Of training, while nothing is decoded."""


class Scene:
    """A server, and the trainer that follows it, at `url`."""

    def __init__(self, server: SideServer, steps: Path, url: str) -> None:
        self._server, self._log, self._url = server, steps, url

    def decode(self, load: Load, seconds: float) -> float:
        """Whole waves for so long: mean seconds of a step of the whole batch."""
        since, until = self._log.stat().st_size, time.monotonic() + seconds
        while time.monotonic() < until:
            self._server.ask(load.requests(), at_once=load.batch, together=load.batch)
        found = decode_steps(read_steps(self._log, since))
        return fmean(step.seconds for step in found if step.batch == load.batch and step.arm == ARM)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Meanwhile it takes steps. All were asked for at once: after the last one it would give its memory back."""

        async def ask() -> None:
            async with AsyncClient(self._url) as trainer:
                await trainer.train_drafter(10**5, within_s=600, until="taken")

        loop = asyncio.new_event_loop()
        asking = loop.create_task(ask())
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(loop.run_until_complete, asking)
            try:
                yield
            finally:
                loop.call_soon_threadsafe(asking.cancel)
                with suppress(asyncio.CancelledError):
                    ended.result()
        loop.close()

    def status(self) -> dict[str, float]:
        found: dict[str, float] = httpx.get(f"{self._url}/tlt/v1/train/status").raise_for_status().json()
        return found

    def alone(self) -> float:
        """Tokens a second that are learnt from while nothing is decoded, once it is known to have drained."""
        time.sleep(3.0)
        with Client(self._url) as trainer:
            trainer.train_drafter(2, within_s=60, until="taken")
            before, began = self.status()["tokens"], time.monotonic()
            trainer.train_drafter(STEPS_ALONE, within_s=120, until="taken")
        return (self.status()["tokens"] - before) / (time.monotonic() - began)

    def rounds(self, load: Load, count: int, share: float) -> Iterator[tuple[float, float]]:
        """Of each: by what share steps beside training take longer than before and after it, and tokens a second that
        are learnt from. share: of the time that a round takes."""
        before_s = self.decode(load, share * QUIET_S)
        for _ in range(count):
            with self.training():
                self.decode(load, share * SETTLING_S)
                learnt, began = self.status()["tokens"], time.monotonic()
                beside_s = self.decode(load, share * BESIDE_S)
                rate = (self.status()["tokens"] - learnt) / (time.monotonic() - began)
            after_s = self.decode(load, share * QUIET_S)
            yield beside_s / fmean((before_s, after_s)) - 1, rate
            before_s = after_s


@contextmanager
def serving(models: Models, sizes: Sequence[int], logs: Path, control: str) -> Iterator[tuple[SideServer, Path]]:
    """A server that follows a trainer at `control`, and its log of steps."""
    steps = logs / "steps.jsonl"
    flags = (*logging_steps(steps), "--trainer", control, "--watchdog", "observe")
    side = Side("chain", ARM, arms=(ARM,), flags=flags, max_batch=sizes[-1])
    site = Site(models.target, models.drafter, logs, sizes, max_tokens=sizes[-1] * (TOKENS + 256))
    with side_by_side([side], site) as servers, awake(servers[side.server]) as server:
        yield server, steps


@contextmanager
def learning(
    models: Models,
    budget: float,
    logs: Path,
    control: str,
    arguments: argparse.Namespace,
) -> Iterator[str]:
    """URL of a trainer that takes steps it is asked for."""
    config = logs / f"train-{budget}.toml"
    config.write_text(
        f"on_demand = true\nentries = {4096 if has_gpu() else 512}\nbuffer_mb = 1024\nthreads = 1\n"
        f'loss = "{arguments.loss}"\ncheckpoint_every = 1000000\n'
        f"[spot]\non = true\nsettle_s = 1.0\nslowdown = {budget}\n"
    )
    padded = arguments.shape != EMBEDDED and not arguments.model_path
    module = (PADDED, arguments.shape, str(models.workload.models)) if padded else ("tlt_server",)
    flags = ("--target", str(models.target), "--drafter", str(models.drafter))
    folder, log = logs / f"drafters-{budget}", logs / f"train-{budget}.log"
    with training(control, config, folder, log, *flags, module=module) as at:
        yield at.removesuffix("/tlt/v1/train/status")


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, after each budget."""
    sizes = (1, 32, 128) if has_gpu() else (1, 4)
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:  # the path of a socket may not be long
        control = f"ipc://{scratch}/control"
        with serving(models, sizes, logs, control) as (server, steps):
            for budget in arguments.budgets:
                with learning(models, budget, logs, control, arguments) as url:
                    figures |= _of_budget(Scene(server, steps, url), budget, sizes, models, arguments)
                yield figures | worst(figures) | {"requests": server.requests, "failed_requests": server.failed}


def _of_budget(
    scene: Scene, budget: float, sizes: Sequence[int], models: Models, arguments: argparse.Namespace
) -> Figures:
    loads = [Load(f"batch_{size}", models.prompts(size), 64 if arguments.smoke else TOKENS) for size in sizes]
    for load in loads:
        scene.decode(load, 1.0)  # prompts are prefilled, and there is something to learn from
    of = f"budget_{round(100 * budget)}"
    figures: Figures = {f"trained_tokens_s_alone_{of}": scene.alone()}
    for load in loads:
        slower, learnt = zip(*scene.rounds(load, arguments.rounds, 0.2 if arguments.smoke else 1.0), strict=True)
        figures |= {
            f"slowdown_{load.name}_{of}": median(slower),
            f"slowdown_min_{load.name}_{of}": min(slower),
            f"slowdown_max_{load.name}_{of}": max(slower),
            f"slowdown_said_{load.name}_{of}": scene.status()["slowdown"],
            f"trained_tokens_s_{load.name}_{of}": median(learnt),
        }
    return figures


def worst(figures: Figures) -> Figures:
    """Of the smallest budget, over all batches."""
    of = f"budget_{min(_budgets(figures))}"
    slower = [value for name, value in figures.items() if re.fullmatch(rf"slowdown_batch_\d+_{of}", name)]
    learnt = [value for name, value in figures.items() if re.fullmatch(rf"trained_tokens_s_batch_\d+_{of}", name)]
    return {"slowdown_shared_gpu_max": max(slower), "trained_tokens_s_shared_gpu": min(learnt)}


def _budgets(figures: Figures) -> list[int]:
    found = {int(match[1]) for name in figures if (match := re.fullmatch(r"trained_tokens_s_alone_budget_(\d+)", name))}
    return sorted(found)


def table(result: Result) -> str:
    """By budget and batch: the slow-down, and what was learnt from meanwhile."""
    figures = result.figures
    sizes = sorted({int(match[1]) for name in figures if (match := re.match(r"slowdown_batch_(\d+)_", name))})
    rows = []
    for budget in _budgets(figures):
        for size in sizes:
            cell = f"batch_{size}_budget_{budget}"
            middle, least, most = (f"{100 * figures[f'slowdown_{end}{cell}']:.1f}" for end in ("", "min_", "max_"))
            learnt, alone = figures[f"trained_tokens_s_{cell}"], figures[f"trained_tokens_s_alone_budget_{budget}"]
            said = f"{100 * figures[f'slowdown_said_{cell}']:.1f}%"
            rows.append([f"{budget}%", str(size), f"{middle}% ({least} to {most})", said, f"{learnt:,.0f}",
                         f"{learnt / alone:.3f}"])  # fmt: skip
    heads = ["budget", "batch", "decode steps take longer by", "as the trainer says", "trained tokens/s", "of alone"]
    return "\n\n".join((tables.origin(result), tables.table(heads, rows)))


def share(text: str) -> float:
    """More than nothing, and less than all, as argparse reads one."""
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a share, between 0 and 1")
    return value


def main(argv: Sequence[str]) -> None:
    flags = command.parser("sharing", __doc__)
    flags.set_defaults(rounds=ROUNDS)
    budgets = " ".join(map(str, BUDGETS))
    flags.add_argument("--budgets", nargs="+", type=share, default=BUDGETS, help=f"shares (default: {budgets})")
    flags.add_argument("--loss", choices=("eagle", "hass"), default="hass", help="of the drafter (default: hass)")
    command.main("sharing", __doc__, argv, measured, table, flags)
