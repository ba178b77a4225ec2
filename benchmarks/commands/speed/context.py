"""The long tail is long: speed-up, and the accept length that breaks even, by context and batch size.

    python -m benchmarks context --json benchmarks/results/context.h200.json

As in accept_length.py the accept length is simulated: the embedded model knows no text of this length. Prompts of many
problems fill the context up to its last 320 tokens, of which 256 are generated. The largest cell, 32 requests of 32k
tokens, fills the card with one server's cache: there the sides stand one after another.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lib import command, tables
from benchmarks.lib.command import Models
from benchmarks.lib.comparison import PLAIN, measure, merged, side_figures, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.sides import Side, Site, name_of
from tlt_server.config import Arm
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs")
ARMS = {Arm(3, 1, 4): 3, Arm(7, 1, 8): 6}  # with the accept length that is simulated
TOKENS = 256
ROOM = 64  # at the end of the context, which speculation reserves
GPU_CELLS = [(512, 1), (512, 8), (512, 32), (8_192, 1), (8_192, 8), (8_192, 32), (32_768, 1), (32_768, 8)]
CROWDED = (32_768, 32)
CPU_CELLS = [(512, 1), (512, 4), (1_536, 1), (1_536, 4)]
GPU_TOKENS = 400_000  # three servers' caches on one card


def sides() -> list[Side]:
    """Plain decoding and simulated chains."""
    return [Side(PLAIN), *(Side(name_of(arm), arm, accept_length=length) for arm, length in ARMS.items())]


def load(models: Models, context: int, batch: int) -> Load:
    return Load(f"context_{context}_batch_{batch}", models.prompts(batch, context - TOKENS - ROOM), TOKENS)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures of the table."""
    cells = CPU_CELLS[:1] if arguments.smoke else GPU_CELLS if has_gpu() else CPU_CELLS
    compared = sides()[:2] if arguments.smoke else sides()
    rounds = 1 if arguments.smoke else arguments.rounds
    loads = [load(models, *cell) for cell in cells]
    longest, most = max(context for context, _ in cells), max(batch for _, batch in cells)
    tokens = GPU_TOKENS if has_gpu() else longest * most
    batches = sorted({batch for _, batch in cells})
    site = Site(models.target, models.drafter, logs, batches, tokens, context=longest)
    found = measure([compared], loads, site, rounds)
    if has_gpu() and not arguments.smoke:
        crowd = load(models, *CROWDED)
        alone = replace(site, max_tokens=int(1.05 * CROWDED[0] * CROWDED[1]))
        found.append(merged(measure([[side] for side in compared[:2]], [crowd], alone, rounds)))
        loads.append(crowd)
    return side_figures(found, loads) | totals(found)


def main(argv: Sequence[str]) -> None:
    command.main("context", __doc__, argv, measured, tables.context)
