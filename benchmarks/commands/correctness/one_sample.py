"""Is a response the same, token for token, whatever drafts it and whatever runs beside it?

    python -m benchmarks one_sample --json benchmarks/results/one_sample.cpu2.json
    python -m benchmarks one_sample --models models/7b-long --workload long --json benchmarks/results/one_sample.h200.json

servers   on a CPU, in float32: requests of every kind, answered by plain decoding; and by servers that draw their arm for
          every step, exchange their drafter, retract requests, have them aborted and continued, stand on two ranks
batches   in the machine's dtype, on one server: with speculation against off, and off against off in other batch sizes,
          which is how far rounding alone goes
law       that the noise gives the law that it should: chi-squared tests of draws from a long-tailed law
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.lib import command, tables
from benchmarks.lib.command import EMBEDDED, Models, parser, positive
from benchmarks.lib.one_sample import servers
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/sampling")


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, after each phase."""
    yield from servers.measured(models, logs, arguments.responses)


def table(result: Result) -> str:
    """Every figure."""
    rows = [[name, f"{value:,.6g}"] for name, value in result.figures.items()]
    return f"{tables.origin(result)}\n\n{tables.table(['figure', ''], rows)}"


def flags() -> argparse.ArgumentParser:
    found = parser("one_sample", __doc__, compares=False)
    found.add_argument("--responses", type=positive, help="of each part")
    if not has_gpu():
        found.set_defaults(shape=EMBEDDED)
    return found


def main(argv: Sequence[str]) -> None:
    command.main("one_sample", None, argv, measured, table, flags())
