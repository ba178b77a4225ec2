"""What would another model gain? Speed-up by accept length and batch size, and the accept length that breaks even.

    python -m benchmarks accept_length --json benchmarks/results/accept_length.h200.json

The accept length is simulated by SGLang (SGLANG_SIMULATE_ACC_LEN): every step is drafted and verified in full, then so
many tokens are taken as accepted. Each length is measured with the shallowest of the chains that can reach it, and a
length of 2 once more with the deepest: what a step costs does not depend on what it accepts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import command, tables
from benchmarks.lib.command import Models
from benchmarks.lib.comparison import PLAIN, measure, side_figures, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.sides import Side, Site, name_of
from tlt_server.config import Arm
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs")
# four deep chains side by side would not fit
GPU_GROUPS = (((1, 2), (3, 3), (5, 5), (7, 2)), ((3, 4), (5, 6), (7, 7), (7, 8)))
CPU_GROUPS = (((1, 2), (3, 3), (3, 4)),)
TOKENS = 256


def groups(pairs: Sequence[Sequence[tuple[int, int]]]) -> list[list[Side]]:
    """Plain decoding and simulated chains, from (steps, accept length)."""
    return [[Side(PLAIN), *(_simulated(steps, length) for steps, length in group)] for group in pairs]


def _simulated(steps: int, length: int) -> Side:
    arm = Arm(steps, 1, steps + 1)
    return Side(f"{name_of(arm)}_accept_{length}", arm, accept_length=length)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures of the table."""
    batches = (1, 8) if arguments.smoke else (1, 2, 4, 8, 16, 32, 64, 128, 256) if has_gpu() else (1, 4, 8)
    sides = groups(GPU_GROUPS if has_gpu() else CPU_GROUPS)
    if arguments.smoke:
        sides = [sides[0][:2]]
    prompts = models.prompts(max(batches))
    loads = [Load(f"batch_{batch}", prompts[:batch], TOKENS) for batch in batches]
    site = Site(models.target, models.drafter, logs, batches, max(batches) * (TOKENS + 64), context=2048)
    found = measure(sides, loads, site, rounds=1 if arguments.smoke else arguments.rounds)
    return side_figures(found, loads) | totals(found)


def main(argv: Sequence[str]) -> None:
    command.main("accept_length", __doc__, argv, measured, tables.accept_length)
