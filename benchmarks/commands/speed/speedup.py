"""How much faster is decoding with speculation, by batch size and arm, on real tokens of the embedded task?

    python -m benchmarks speedup --upstream /tmp/upstream --json speedup.json

On a GPU, beside each arm of ours stands SGLang as its authors ship it with the same one (--upstream), and once its
--speculative-adaptive. A group of servers shares the card; each group has a plain one, which its others are compared
with.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
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
CHAINS = [Arm(steps, 1, steps + 1) for steps in (1, 3, 5, 7)]
TREES = {Arm(5, 4, 8): 128, Arm(5, 4, 16): 64, Arm(8, 4, 32): 16}  # arms, and the largest batch each is asked
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = 256


def gpu_groups(upstream: bool) -> list[list[Side]]:
    """What shares the card: up to five servers of a 7B shape."""
    arms = dict.fromkeys(CHAINS, max(BATCHES)) | TREES
    ours = {arm: Side(name_of(arm), arm, max_batch=most) for arm, most in arms.items()}
    theirs = {arm: replace(side, name=f"upstream_{side.name}", upstream=True) for arm, side in ours.items()}
    # a deep chain at the largest batch takes most memory: a shallow one stands beside it
    together = [CHAINS[::3], CHAINS[1:3], *([tree] for tree in TREES)]
    groups = [[Side(PLAIN), *(ours[arm] for arm in each), *(theirs[arm] for arm in each)] for each in together]
    groups[2].append(Side("upstream_plain", upstream=True))
    # it starts only with the deepest of its depths: buffers are sized by the flags
    groups[-1].append(Side("upstream_adaptive", CHAINS[3], upstream=True, flags=("--speculative-adaptive",)))
    return [[side for side in group if upstream or not side.upstream] for group in groups]


def cpu_groups() -> list[list[Side]]:
    """A few arms, on a CPU that knows no other peer."""
    arms = [*CHAINS[:3], Arm(3, 2, 6)]
    return [[Side(PLAIN), *(Side(name_of(arm), arm, max_batch=8) for arm in arms)]]


def best_figures(figures: Figures, batches: Sequence[int]) -> Figures:
    """The best static arm's speed-up at each batch size, ours and upstream's, each over our plain decoding."""
    best: Figures = {}
    for batch in batches:
        for prefix in ("", "upstream_"):
            kinds = tuple(f"speedup_{prefix}{kind}_" for kind in ("chain", "tree"))
            end = f"_batch_{batch}"
            found = [value for name, value in figures.items() if name.startswith(kinds) and name.endswith(end)]
            if found:
                best[f"speedup_{prefix}batch_{batch}"] = max(found)
    return best


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures of the table."""
    batches = (1, 8) if arguments.smoke else BATCHES if has_gpu() else (1, 2, 4, 8)
    groups = gpu_groups(bool(arguments.upstream)) if has_gpu() else cpu_groups()
    if arguments.smoke:
        groups = [groups[0][:2]]
    prompts = models.prompts(max(batches))
    loads = [Load(f"batch_{batch}", prompts[:batch], 64 if arguments.smoke else TOKENS) for batch in batches]
    each = TOKENS + 64  # prompt, and what speculation reserves
    site = Site(models.target, models.drafter, logs, batches, max(batches) * each, arguments.upstream, context=2048)
    found = measure(groups, loads, site, rounds=1 if arguments.smoke else arguments.rounds)
    figures = side_figures(found, loads)
    return figures | best_figures(figures, batches) | totals(found)


def main(argv: Sequence[str]) -> None:
    command.main("speedup", __doc__, argv, measured, tables.speedup)
