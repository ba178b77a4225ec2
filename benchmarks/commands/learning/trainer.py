"""How fast does the drafter trainer learn, what does a checkpoint cost it, how soon does it give a worker back?

    python -m benchmarks trainer --json benchmarks/results/trainer.h200.json

No server, no target: an EAGLE drafter of the chosen shape learns from random features, in sequences as long as the
embedded target's rollouts are.

1. steps on packed batches, beside steps on padded ones of as many entries, in rounds
2. a checkpoint beside training, and a whole one that training waits for
3. load that arrives while a worker trains
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.markdown import Markdown

from benchmarks.lib.command import EMBEDDED, out, positive, run
from benchmarks.lib.training import lengths, shown
from benchmarks.lib.training.batches import WAYS
from benchmarks.lib.training.jobs import Job, config_of
from benchmarks.lib.training.saving import checkpoint_figures
from benchmarks.lib.training.work import operations, peak_tflops
from benchmarks.lib.training.yielding import yield_figures
from benchmarks.models.shapes import SHAPES
from tlt_server import results
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.packing import Pack, Run, pack

MEASURES = ("tlt_server/trainer",)


class Size(NamedTuple):
    """How much to measure. rollouts: at most. rounds: of all ways of batching. times: of saves and yields."""

    rollouts: int
    rounds: int
    times: int


FULL, SMOKE = Size(256, 5, 5), Size(24, 1, 1)


def batching_figures(job: Job, trainer: Trainer, runs: Sequence[Run], rounds: int) -> Figures:
    """Rollouts and tokens a second by the way of batching, in rounds in which every way has its turn."""
    batches = {way: make(runs, job.budget, job.device) for way, make in WAYS.items()}
    for made in batches.values():
        trainer.step(made[:1])  # kernels are compiled
    took: dict[str, list[list[float]]] = {way: [[] for _ in made] for way, made in batches.items()}
    for number in range(rounds):
        for turn in range(len(WAYS)):
            way = list(WAYS)[(number + turn) % len(WAYS)]
            for batch, times in zip(batches[way], took[way], strict=True):
                times.append(_seconds(job, trainer, batch))
    seconds = {way: sum(min(times) for times in of_batches) for way, of_batches in took.items()}
    entries = sum(each.entries for each in runs)
    figures: Figures = {"rollouts": len(runs), "entries": entries, "entries_max": max(each.entries for each in runs)}
    for way, made in batches.items():
        figures[f"samples_per_s_{way}"] = len(runs) / seconds[way]
        figures[f"batches_{way}"] = len(made)
        figures[f"filled_{way}"] = entries / sum(len(each.tokens) for each in made)
    figures["packing_speedup"] = seconds["padded"] / seconds["packed"]
    return figures | _rates(job, trainer, batches["packed"], seconds["packed"], entries)


def _seconds(job: Job, trainer: Trainer, batch: Pack) -> float:
    """Of one step."""
    job.wait()
    began = time.perf_counter()
    trainer.step([batch])
    job.wait()
    return time.perf_counter() - began


def _rates(job: Job, trainer: Trainer, packs: Sequence[Pack], took: float, entries: int) -> Figures:
    """Of steps on all packs, which took so many seconds."""
    tflops, peak = operations(trainer, packs) / took / 1e12, peak_tflops(job.device)
    return {
        "step_ms": 1000 * took / len(packs),
        "tokens_per_s": entries / took,
        "training_tflops": tflops,
        "peak_tflops": peak,
        "mfu": tflops / peak,
    }


def pack_ms(job: Job, runs: Sequence[Run], times: int) -> float:
    """Milliseconds that it takes to make one pack of runs in host memory, on the device; median."""
    took = []
    for _ in range(times):
        job.wait()
        began = time.perf_counter()
        count = len(pack(runs, job.budget, job.device))
        job.wait()
        took.append(1000 * (time.perf_counter() - began) / count)
    return median(took)


def measured(job: Job, size: Size) -> Figures:
    """All figures."""
    kept = lengths.kept()
    runs = job.runs(kept[:: -(-len(kept) // size.rollouts)])
    trainer = job.trainer()
    figures: Figures = {
        "parameters_m": sum(weight.numel() for weight in trainer.network.parameters()) / 1e6,
        "budget": job.budget,
    }
    figures |= batching_figures(job, trainer, runs, size.rounds)
    figures["pack_ms"] = pack_ms(job, runs, size.times)
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
        figures |= checkpoint_figures(job, trainer, Path(scratch) / "saves", size.times)
        del trainer  # its memory is not to be counted below
        return figures | yield_figures(job, runs, size.times)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trainer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    gpu = has_gpu()
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    parser.add_argument(
        "--shape",
        default="qwen2.5-7b" if gpu else EMBEDDED,
        help=f"of the target: one of {', '.join((EMBEDDED, *SHAPES))}",
    )
    parser.add_argument("--budget", type=positive, default=4096, help="entries of a batch (default: 4096)")
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="torch's name")
    parser.add_argument("--smoke", action="store_true", help="as little as proves that the command runs")
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        job = Job(config_of(arguments.shape), arguments.budget, torch.device(arguments.device))
        figures = measured(job, SMOKE if arguments.smoke else FULL)
        result = results.measured_here("trainer", [*parser.prog.split(), *argv], figures)
        out.print(Markdown(shown.trainer(result)))
        return result

    run("trainer", arguments, measure)
