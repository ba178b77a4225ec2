"""What does a step cost in the shapes of other models: a small and a large dense one, a mixture of experts, one in fp8?

    python -m benchmarks shapes --shapes moe --json part1.json
    python -m benchmarks shapes --shapes fp8 --models /tmp/models/7b --json part2.json
    python -m benchmarks shapes --join part1.json part2.json --json benchmarks/results/shapes.h200.json

Of each shape one server with arms, whose accept length SGLang simulates, decodes plainly and by each of them in turn.
Weights are made up (benchmarks/models/hollow.py), but in fp8, where the embedded model's are quantized by blocks: a
second server has them, whose greedy answers are held against those of plain decoding.

Then, while requests run, the drafter is exchanged and a part of the target published in a session. What fails in one
shape is told, and the others are measured.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import to_builtins

from benchmarks.lib import parts, tables
from benchmarks.lib.command import EMBEDDED, Models, parser
from benchmarks.lib.comparison import PLAIN, measure_group, side_figures
from benchmarks.lib.decoding import Load
from benchmarks.lib.reload.weights import Tensors
from benchmarks.lib.shapes.equality import compare, requests_of
from benchmarks.lib.shapes.updating import update
from benchmarks.lib.sides import Side, SideServer, Site, awake, side_by_side
from benchmarks.lib.strategies import OFF, fixed, strategy
from benchmarks.models import hollow, shapes
from tlt_server.config import Arm
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.engine.loading.schema import tensors_in
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu
from tlt_server.process import tail
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs")
ARMS = (Arm(3, 1, 4), Arm(7, 1, 8))
ACCEPTED = 3
EXACT = "exact"
TOKENS = 192
ROOM = 192  # of each request: its prompt, and what the widest arm reserves under overlap, twice
COMPARED = 32  # greedy requests at once
CPU_SIZES = (1, 2)
TINY = shapes.Shape(bias=True, vocab=512, hidden=320, layers=6, heads=8, kv_heads=2, mlp=800)


@dataclass(frozen=True)
class Plan:
    """of: the model, as --shape names it; None: Qwen3-30B-A3B. flags: on a GPU. quantized: in fp8, with weights."""

    of: str | None
    batches: tuple[int, ...] = (1, 8, 32)
    flags: tuple[str, ...] = ()
    quantized: bool = False


PLANS = {
    "1500m": Plan("qwen2.5-1.5b"),
    "32b": Plan("qwen2.5-32b"),
    # Triton, here and below, needs nothing that is compiled for minutes, and no DeepGEMM
    "moe": Plan(None, (1, 8, 32, 128), ("--moe-runner-backend", "triton")),
    "fp8": Plan("qwen2.5-7b", (1, 8, 32, 128), ("--fp8-gemm-backend", "triton"), quantized=True),
}


@dataclass(frozen=True)
class Served:
    """A shape's models, on disk. part: of the target, to be published. flags: of a server."""

    target: Path
    drafter: Path
    part: Tensors
    flags: tuple[str, ...] = ("--watchdog", "observe")


def made(plan: Plan, folder: Path, kept: Path, tokenizer: Path, tiny: bool) -> Served:
    """kept: where a model with weights is made, or found. tiny: of the same family, for a CPU, and not quantized."""
    if plan.quantized:
        built = shapes.build(TINY if tiny else str(plan.of), kept, names=("target", "drafter"), fp8=not tiny)
        torch.cuda.empty_cache()  # the servers need what building took
        weights = tensors_in(sorted(built.target.glob("*.safetensors")))
        part = {name: each for name, each in weights if ".layers.0.self_attn." in name}
        served = Served(built.target, built.drafter, part)
    else:
        config = hollow.mixture(tiny) if plan.of is None else hollow.dense(plan.of, tiny)
        target, drafter = hollow.write(config, folder, tokenizer)
        served = Served(target, drafter, hollow.part_of(config), (*hollow.FLAGS, "--watchdog", "observe"))
    return served if tiny else replace(served, flags=(*served.flags, *plan.flags))


def sides(sizes: Sequence[int], arms: Sequence[Arm]) -> list[Side]:
    """Of one server: plain decoding, which the others are held against, and each arm."""
    most = {arm: sizes_of(arm, sizes)[-1] if has_gpu() else sizes[-1] for arm in arms}
    named = {OFF: PLAIN}
    return [
        replace(side, name=named.get(side.name, side.name), accept_length=ACCEPTED) for side in fixed(most, sizes[-1])
    ]


def one(shape: str, models: Models, folder: Path, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """The figures of a shape, `requests` and `failed_requests` among them: after each round; then of updates, too."""
    plan = PLANS[shape]
    tiny = arguments.smoke or not has_gpu()
    sizes, arms, rounds = (CPU_SIZES, ARMS[:1], 1) if tiny else (plan.batches, ARMS, arguments.rounds)
    compared = CPU_SIZES[-1] if tiny else COMPARED
    served = made(plan, folder, arguments.models or folder / "kept", models.target, tiny)
    prompts = models.prompts(max(*sizes, compared))
    loads = [Load(f"batch_{size}", prompts[:size], TOKENS) for size in sizes]
    held = max(sizes[-1], compared) * (TOKENS + ROOM)
    site = Site(served.target, served.drafter, logs, sizes, held, context=2048, flags=served.flags)
    group = sides(sizes, arms)
    exact = [Side(EXACT, arms[0])] if plan.quantized else []
    with side_by_side([*group, *exact], site) as servers:
        for found in measure_group(group, servers, loads, rounds, lambda *_: None):
            yield side_figures([found], loads, f"{shape}_") | counts(shape, servers)
        with awake(servers[(exact or group)[0].server]) as server:

            def updated() -> Figures:
                strategy(server, **to_builtins(group[1].strategy))
                return update(server, requests_of(prompts[:compared]), served.drafter, served.part)

            told = compare(server, prompts[:compared], updated) if exact else updated()
        yield {f"{name}_{shape}": value for name, value in told.items()} | counts(shape, servers)


def counts(shape: str, servers: Mapping[str, SideServer]) -> Figures:
    failed = sum(each.failed for each in servers.values())
    asked = sum(each.requests for each in servers.values())
    return {"requests": asked, "failed_requests": failed, f"failed_requests_{shape}": failed}


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, again and again.

    Raises:
        ServerFailed: in the end, for shapes that could not be measured whole.
    """
    figures: Figures = dict.fromkeys(parts.SUMMED, 0)
    failed = []
    for shape in arguments.shapes:
        own, before = logs / shape, dict(figures)
        own.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix="tlt-shape-") as folder:
                for found in one(shape, models, Path(folder), own, arguments):
                    figures |= found | {name: before[name] + found[name] for name in parts.SUMMED}
                    yield figures
        except Exception:
            ends = "\n".join(f"{log}:\n{tail(log)}" for log in sorted(own.glob("*.log")))
            logging.exception("%s is not measured whole. Its servers' logs end so:\n%s", shape, ends)
            failed.append(shape)
    if failed:
        raise ServerFailed(f"{', '.join(failed)}: not measured whole; what was is kept")


def table(result: Result) -> str:
    """Of each shape a step's time by arm and batch size, and what it gains at the simulated accept length."""
    names, loads = tables.sides_and_loads(result.figures)
    shown = [tables.caption(result)]
    for shape in (each for each in PLANS if f"{each}_{PLAIN}" in names):
        own = [load for load in loads if f"step_ms_{shape}_{PLAIN}_{load}" in result.figures]
        arms = [name.removeprefix(f"{shape}_") for name in names if name.startswith(f"{shape}_")]
        rows = [
            [f"{tables.label(arm)}, {what}", *tables.cells(result.figures, f"{figure}_{shape}_{arm}", own, form)]
            for figure, what, form in (("step_ms", "ms per step", ".2f"), ("speedup", "speed-up", ".2f"))
            for arm in arms
            if figure == "step_ms" or arm != PLAIN
        ]
        told = [
            f"{name.removesuffix(f'_{shape}').replace('_', ' ')}: {value:.3g}"
            for name, value in result.figures.items()
            if name.endswith(f"_{shape}")
        ]
        batches = [f"batch {tables.numbers_in(load)[0]}" for load in own]
        shown += [tables.table([f"{shape}, accept length {ACCEPTED}", *batches], rows), "; ".join(told) + "."]
    return "\n\n".join(shown)


def main(argv: Sequence[str]) -> None:
    flags = parser("shapes", __doc__)
    flags.add_argument("--shapes", nargs="+", choices=PLANS, default=list(PLANS), help="default: all")
    flags.set_defaults(shape=EMBEDDED)
    parts.main(flags, argv, measured, lambda _: {}, table)
