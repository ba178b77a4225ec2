"""Long contexts: speed-up by context and batch size, by what is accepted there, and at a simulated accept length.

    python -m benchmarks context --workload long --json benchmarks/results/context.h200.json

Solved problems fill the context up to its last 320 tokens, of which 256 are generated: the problem at the end, and what
the model goes on with. Beside the arms of one server, which the bandit chooses from, stands a chain whose accept length
SGLang simulates: what a step costs, whatever the model.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lib import parts, tables
from benchmarks.lib.command import Models, parser
from benchmarks.lib.comparison import PLAIN, measuring, side_figures, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.sides import Side, Site, name_of
from benchmarks.lib.strategies import fixed, learning
from tlt_server.config import Arm
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs", "tlt_server/strategy")
ARMS = (Arm(1, 1, 2), Arm(3, 1, 4), Arm(7, 1, 8), Arm(5, 4, 16))
SIMULATED, ACCEPTED = Arm(3, 1, 4), 3
TOKENS = 256
ROOM = 64  # at the end of the context, which speculation reserves
GPU_CELLS = [(512, 1), (512, 8), (8_192, 1), (8_192, 8), (32_768, 1), (32_768, 4), (32_768, 8)]
CPU_CELLS = [(512, 1), (512, 4), (1_536, 1), (1_536, 4)]
GPU_TOKENS = 300_000  # three servers' caches on one card


def sides(sizes: Sequence[int]) -> list[Side]:
    """Plain decoding, arms by themselves, the bandit, and a simulated chain."""
    arms = ARMS if has_gpu() else ARMS[1:3]
    most = {arm: sizes_of(arm, sizes)[-1] if has_gpu() else sizes[-1] for arm in arms}
    one = Side(f"{name_of(SIMULATED)}_accept_{ACCEPTED}", SIMULATED, accept_length=ACCEPTED)
    ours = [side for side in (*fixed(most, sizes[-1]), *learning(arms)) if side.name != "paper"]
    return [Side(PLAIN), *ours, one]


def load(models: Models, context: int, batch: int) -> Load:
    return Load(f"context_{context}_batch_{batch}", models.prompts(batch, context - TOKENS - ROOM), TOKENS)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures of the table, after each round."""
    cells = CPU_CELLS[:1] if arguments.smoke else GPU_CELLS if has_gpu() else CPU_CELLS
    longest, most = max(context for context, _ in cells), max(batch for _, batch in cells)
    batches = sorted({batch for _, batch in cells})
    group = sides(batches)
    group = [group[0], group[-1]] if arguments.smoke else group
    loads = [load(models, *cell) for cell in cells]
    held = GPU_TOKENS if has_gpu() else longest * most
    site = Site(models.target, models.drafter, logs, batches, held, context=longest)
    for number, found in enumerate(measuring([group], loads, site, 1 if arguments.smoke else arguments.rounds), 1):
        yield side_figures(found, loads) | totals(found) | {"rounds": number}


def summary(figures: Figures) -> Figures:
    """What is claimed: the bandit's speed-ups, and those of the simulated chain."""
    simulated = f"{name_of(SIMULATED)}_accept_{ACCEPTED}"
    told = {"bandit_context_": "context_speedup_", f"{simulated}_context_": f"context_ratio_{simulated}_"}
    return {
        claim + name.removeprefix(f"speedup_{begin}").replace("batch_", ""): value
        for name, value in figures.items()
        for begin, claim in told.items()
        if name.startswith(f"speedup_{begin}")
    }


def main(argv: Sequence[str]) -> None:
    parts.main(parser("context", __doc__), argv, measured, summary, tables.context)
