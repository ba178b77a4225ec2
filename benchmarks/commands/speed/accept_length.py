"""How many tokens does a step give, to natural ends? What would another model gain, by accept length and batch size?

    python -m benchmarks accept_length --workload long --natural --json part1.json
    python -m benchmarks accept_length --workload long --natural --eagle3 --json part2.json
    python -m benchmarks accept_length --workload long --json part3.json
    python -m benchmarks accept_length --join part[123].json --json benchmarks/results/accept_length.h200.json

With --natural every arm answers the workload's problems to their natural ends, at several temperatures and after long
contexts, by its drafter, by one with noise on its weights, and by one whose target has moved on: tokens a verify pass,
the token of the prefill left out. Beside chains stands what is computed of the same responses, as `benchmarks/lib/
accepting.py` says: with the noise that drafter and target share, and if the likeliest tokens were drafted.

Else the accept length is simulated by SGLang (SGLANG_SIMULATE_ACC_LEN): every step is drafted and verified in full,
then so many tokens are taken as accepted, whatever the model. What a step costs does not depend on what it accepts, so
that one length for each chain tells the others.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lib import parts, tables
from benchmarks.lib.accepting import CHAIN_3, COMPUTED, GREEDY, natural
from benchmarks.lib.command import Models, parser
from benchmarks.lib.comparison import PLAIN, measure, side_figures, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.sides import Side, Site, name_of
from tlt_server.config import Arm
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs", "tlt_server/engine/sampling")
GPU_PAIRS = ((1, 2), (3, 3), (5, 5), (7, 7))
CPU_PAIRS = ((1, 2), (3, 3), (3, 4))
TOKENS = 256
CLAIMS = {"accept_length_worst_ratio_to_computed": COMPUTED, "sharpness_worst_ratio_to_greedy": GREEDY}


def sides(pairs: Sequence[tuple[int, int]]) -> list[Side]:
    """Plain decoding and simulated chains, from (steps, accept length)."""
    return [Side(PLAIN), *(_simulated(steps, length) for steps, length in pairs)]


def _simulated(steps: int, length: int) -> Side:
    arm = Arm(steps, 1, steps + 1)
    return Side(f"{name_of(arm)}_accept_{length}", arm, accept_length=length)


def simulated(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures of the table of simulated lengths."""
    batches = (1, 8) if arguments.smoke else (1, 8, 32, 128, 256) if has_gpu() else (1, 4, 8)
    group = sides(GPU_PAIRS if has_gpu() else CPU_PAIRS)
    if arguments.smoke:
        group = group[:2]
    prompts = models.prompts(max(batches))
    loads = [Load(f"batch_{batch}", prompts[:batch], TOKENS) for batch in batches]
    site = Site(models.target, models.drafter, logs, batches, max(batches) * (TOKENS + 64), context=2048)
    found = measure([group], loads, site, rounds=1 if arguments.smoke else arguments.rounds)
    return side_figures(found, loads) | totals(found)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """The figures of one of the two halves."""
    if arguments.natural:
        models = models.with_eagle3() if arguments.eagle3 else models
        yield from natural(models, logs, arguments)
    else:
        yield simulated(models, logs, arguments)


def summary(figures: Figures) -> Figures:
    """What is claimed: chain 3's accept lengths at long contexts; and of all chains the least that they reach of the
    computation, and of drafts without noise."""
    begin = f"accept_length_{name_of(CHAIN_3)}_at_"
    made = {name.replace(begin, "accept_length_at_"): v for name, v in figures.items() if name.startswith(begin)}
    for claim, of in CLAIMS.items():
        names = [name for name in figures if name not in CLAIMS and name.endswith(of)]
        made |= {claim: min(figures[name.removesuffix(of)] / figures[name] for name in names)} if names else {}
    return made


def main(argv: Sequence[str]) -> None:
    flags = parser("accept_length", __doc__)
    flags.add_argument("--natural", action="store_true", help="what is accepted, to natural ends; not simulated")
    flags.add_argument("--eagle3", action="store_true", help="with --natural: by the workload's EAGLE-3 drafter")
    parts.main(flags, argv, measured, summary, tables.accept_length)
