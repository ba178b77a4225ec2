"""What do the CUDA graphs of several arms take of a card, beside those of one?

    python -m benchmarks graphs --models models/7b --json benchmarks/results/graphs.h200.json

Three servers, one after another, with the same list of batch sizes: `one` has one arm; `naive` has four, each captured
by itself at every size, as --graph-sharing none does; `pool` has the same four as a server captures them by default.
Each says itself what the card had less of after its captures; nothing else may run on the card meanwhile. On a CPU
there are no graphs, and the command shows only that it runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tlt_client import Client
from tlt_client.schemas import CapturedPass, Graphs

from benchmarks.commands.speed.speedup import BATCHES
from benchmarks.lib import command, tables
from benchmarks.lib.command import Models, parser, positive
from benchmarks.lib.sides import Side, Site, awake, name_of, side_by_side
from tlt_server.config import Arm, GraphSharing
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result
from tlt_server.strategy.arms import DRAFT_EXTEND, DRAFTING, PLAIN, VERIFICATION
from tlt_server.strategy.settings import from_client

MEASURES = ("tlt_server/engine/graphs",)
ARMS = (Arm(3, 1, 4), Arm(7, 1, 8), Arm(5, 4, 16), Arm(8, 4, 32))
ONE, NAIVE, POOL = "one", "naive", "pool"
KINDS = (VERIFICATION, DRAFTING, DRAFT_EXTEND, PLAIN)
CONTEXT = 2048


class Kind(NamedTuple):
    """Of server.

    arms: that it has.
    sharing: of their graphs.
    """

    arms: Sequence[Arm]
    sharing: GraphSharing


SERVERS = {
    ONE: Kind(ARMS[:1], GraphSharing.POOL),
    NAIVE: Kind(ARMS, GraphSharing.NONE),
    POOL: Kind(ARMS, GraphSharing.POOL),
}


def captured(models: Models, logs: Path, name: str, kind: Kind, batches: Sequence[int]) -> Graphs:
    """What a server of this kind says of its graphs."""
    folder = logs / name
    folder.mkdir(exist_ok=True)
    site = Site(models.target, models.drafter, folder, batches, max(batches) * 256, context=CONTEXT)
    side = Side(name, arms=tuple(kind.arms), flags=("--graph-sharing", kind.sharing.value))
    with side_by_side([side], site) as servers, awake(servers[side.server]) as server, Client(server.url) as client:
        graphs = client.strategy().graphs
    if graphs is None:
        raise ConfigError(f"server {name} has no drafter: give --drafter, or no --model-path")
    return graphs


def figures_of(name: str, passes: Sequence[CapturedPass]) -> Figures:
    """A server's, in GB; none where it has captured nothing."""
    if not passes:
        return {}
    figures: Figures = {
        f"graph_gb_{name}": sum(each.gb for each in passes),
        f"graph_gb_{name}_buffers": sum(each.buffers_gb for each in passes),
        f"graph_gb_{name}_driver": sum(each.driver_gb for each in passes),
        f"graphs_{name}": sum(len(each.sizes) for each in passes),
    }
    for kind in KINDS:
        of_kind = [each.gb for each in passes if each.kind == kind]
        figures[f"graph_gb_{name}_{kind.replace('-', '_')}"] = sum(of_kind)
    for arm in ARMS:
        own = [each for each in passes if arm in map(from_client, each.arms)]
        if own:
            figures[f"largest_batch_{name}_{name_of(arm)}"] = min(max(each.sizes) for each in own)
        if own and name == NAIVE:
            figures[f"graph_gb_{name}_{name_of(arm)}"] = sum(each.gb for each in own)
    return figures


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures of the table."""
    batches = tuple(sorted(arguments.batches or ((1, 4) if arguments.smoke else BATCHES)))
    figures: Figures = {}
    for name, kind in SERVERS.items():
        figures |= figures_of(name, captured(models, logs, name, kind, batches).passes)
    return figures | ratios(figures)


def ratios(figures: Figures) -> Figures:
    """Of four arms over one."""
    if f"graph_gb_{ONE}" not in figures:
        return {}
    return {f"graph_ratio_{name}": figures[f"graph_gb_{name}"] / figures[f"graph_gb_{ONE}"] for name in (NAIVE, POOL)}


def table(result: Result) -> str:
    """By server, what its graphs take; what that consists of; how far each arm was captured."""
    figures = result.figures
    if f"graph_gb_{ONE}" not in figures:
        return "No CUDA graph was captured: this machine has no GPU that could hold one."
    sums = ["", "_buffers", "_driver", *(f"_{kind.replace('-', '_')}" for kind in KINDS)]
    of_one = {NAIVE: "graph_ratio_naive", POOL: "graph_ratio_pool"}
    rows = []
    for name, kind in SERVERS.items():
        cells = [f"{figures[f'graph_gb_{name}{each}']:.2f}" for each in sums]
        ratio = f"{figures[of_one[name]]:.2f}" if name in of_one else "1"
        rows.append([name, str(len(kind.arms)), str(figures[f"graphs_{name}"]), cells[0], ratio, *cells[1:]])
    header = ["server", "arms", "graphs", "GB", "of one", "buffers", "driver", *KINDS]
    found = [
        [
            tables.label(name_of(arm)),
            *(str(figures.get(f"largest_batch_{name}_{name_of(arm)}", "")) for name in SERVERS),
        ]
        for arm in ARMS
    ]
    largest = tables.table(["largest batch", *SERVERS], found)
    return "\n\n".join((tables.origin(result), tables.table(header, rows), largest))


def main(argv: Sequence[str]) -> None:
    flags = parser("graphs", __doc__, compares=False)
    flags.add_argument("--batches", type=positive, nargs="+", metavar="N", help="sizes to capture (default: 1 to 256)")
    command.main("graphs", None, argv, measured, table, flags)
