"""Is a response the same, token for token, whatever drafts it and whatever runs beside it?

    python -m benchmarks one_sample --json benchmarks/results/one_sample.cpu2.json
    python -m benchmarks one_sample --models models/7b --json benchmarks/results/one_sample.h200.json

1. that noise gives the law that it should: chi-squared tests of draws from a law with a long tail, and of pairs
2. on a CPU, in float32: requests of every kind, by plain decoding; then by servers that draw their arm for every step,
   exchange drafters, retract requests, abort them and continue, or stand on two ranks
3. on a GPU, in bfloat16, or with --batches: one server, with speculation against off; and off in batches of other sizes
   against off, which is how far rounding alone goes
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib import command, tables
from benchmarks.lib.command import EMBEDDED, Models, parser, positive
from benchmarks.lib.one_sample import batches, law, servers
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/sampling")


class Size(NamedTuple):
    """How much to measure.

    responses: of plain decoding, or of off; other phases have a share of them.
    tokens: of each response on one server.
    draws, pairs: of the law.
    """

    responses: int
    tokens: int
    draws: int
    pairs: int


GPU = Size(responses=512, tokens=256, draws=1_000_000, pairs=1_000_000)
CPU = Size(responses=2048, tokens=256, draws=10_000, pairs=1_000_000)
SMOKE = Size(responses=32, tokens=32, draws=200, pairs=10_000)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, after each phase."""
    size = SMOKE if arguments.smoke else GPU if has_gpu() else CPU
    count = arguments.responses or size.responses
    figures = law.measured(arguments.draws or size.draws, size.pairs)
    if has_gpu() or arguments.batches:
        found = batches.measured(models, logs, count, arguments.tokens or size.tokens)
    else:
        found = servers.measured(models, logs, count, ["eagle"] if arguments.smoke else servers.SERVERS)
    for each in found:
        yield figures | each


def table(result: Result) -> str:
    """Every figure."""
    rows = [[name, f"{value:,.6g}"] for name, value in result.figures.items()]
    return f"{tables.origin(result)}\n\n{tables.table(['figure', 'value'], rows)}"


def flags() -> argparse.ArgumentParser:
    size = GPU if has_gpu() else CPU
    found = parser("one_sample", __doc__, compares=False)
    found.add_argument("--responses", type=positive, metavar="N", help=f"default: {size.responses}")
    found.add_argument("--tokens", type=positive, metavar="N", help=f"of each, on one server (default: {size.tokens})")
    found.add_argument("--draws", type=positive, metavar="N", help=f"of the law (default: {size.draws})")
    found.add_argument("--batches", action="store_true", help="on a CPU: what a GPU would measure")
    if not has_gpu():
        found.set_defaults(shape=EMBEDDED)
    return found


def main(argv: Sequence[str]) -> None:
    command.main("one_sample", None, argv, measured, table, flags())
