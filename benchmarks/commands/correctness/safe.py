"""Do responses stay right and the server up, whatever clients and peers send?

    python -m benchmarks safe --json benchmarks/results/safe.cpu2.json

Hostile requests to all routes, aborts at random steps, hostile messages from peers to a trainer and to a server,
memory lent and taken back in every order, pickles that carry code, publications without a flush, and a soak of half an
hour in which everything happens at once. Each part starts the servers that it needs (benchmarks/lib/safety); all is
drawn from `--seed`. `--parts` runs some alone, `--join` makes one result of several.
"""

import argparse
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.lib import parts
from benchmarks.lib.command import EMBEDDED, Models, parser
from tlt_server.results import Figures, Result

MEASURES = (
    "tlt_server/api",
    "tlt_server/engine/loading",
    "tlt_server/engine/weights",
    "tlt_server/link",
    "tlt_server/wire",
)
COUNTS: Mapping[str, int] = {
    "requests": 1500,
    "routes": 1000,
    "aborts": 2000,
    "peers": 50_000,
    "offload": 14,
    "gadgets": 300,
    "prefixes": 30,
    "soak": 1800,
}
"""How many cases of each part; of the soak, seconds."""
SMOKE: Mapping[str, int] = {part: max(2, count // 60) for part, count in COUNTS.items()} | {"soak": 90}


def added(figures: Figures, more: Figures) -> Figures:
    """Figures of two parts: counts that both have are of both together."""
    return figures | {name: figures.get(name, 0) + value for name, value in more.items()}


def measured(_models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """The figures of one part, of two, and so on."""
    figures: Figures = {}
    for part in arguments.parts:
        measure = importlib.import_module(f"benchmarks.lib.safety.{part}").measure
        began = time.monotonic()
        found = measure((SMOKE if arguments.smoke else COUNTS)[part], arguments.seed, logs)
        figures = added(figures, found | {f"{part}_part_s": time.monotonic() - began})
        yield figures


def table(result: Result) -> str:
    """The figures as a list."""
    return "\n".join(f"- {name}: {value:,.4g}" for name, value in result.figures.items())


def flags() -> argparse.ArgumentParser:
    found = parser("safe", __doc__, compares=False)
    found.add_argument("--parts", nargs="+", choices=COUNTS, default=list(COUNTS), help="default: all")
    found.add_argument("--seed", type=int, default=2026)
    found.set_defaults(shape=EMBEDDED)
    return found


def main(argv: Sequence[str]) -> None:
    parts.main(flags(), argv, measured, lambda _: {}, table)
