"""How many tokens does a step give, to natural ends? What would another model gain, by accept length and batch size?

    python -m benchmarks accept_length --workload long --natural --json part1.json
    python -m benchmarks accept_length --workload long --json part2.json
    python -m benchmarks accept_length --join part1.json part2.json --json benchmarks/results/accept_length.h200.json

With --natural every arm answers the workload's problems to their natural ends, at several temperatures and after long
contexts: tokens a verify pass, the token of the prefill left out.

Else the accept length is simulated by SGLang (SGLANG_SIMULATE_ACC_LEN): every step is drafted and verified in full,
then so many tokens are taken as accepted, whatever the model. What a step costs does not depend on what it accepts, so
that one length for each chain tells the others.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands.speed.strategy import NATURAL_FLAGS
from benchmarks.lib import parts, tables
from benchmarks.lib.command import Models, out, parser
from benchmarks.lib.comparison import PLAIN, measure, side_figures, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.servers import Server
from benchmarks.lib.sides import Side, Site, awake, name_of, side_by_side
from benchmarks.lib.strategies import Strategies, fixed
from tlt_server.config import Arm
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs")
GPU_PAIRS = ((1, 2), (3, 3), (5, 5), (7, 7))
CPU_PAIRS = ((1, 2), (3, 3), (3, 4))
TOKENS = 256

CHAIN_3, CHAIN_7 = Arm(3, 1, 4), Arm(7, 1, 8)
NATURAL_ARMS = (CHAIN_3, CHAIN_7, Arm(5, 4, 16), Arm(8, 4, 32))
AT_ONCE = (1, 4, 16, 64, 256)  # requests; an arm is asked as many as it has graphs for, which then drain
RESPONSES, GROUP = 512, 8
LONGEST = 4096  # tokens of a response: beyond it a few requests would take most of the time
HELD = 1024  # tokens of KV cache a request: a few are longer while most have ended


@dataclass(frozen=True)
class Case:
    """What a chain is asked; trees are asked the first one alone. context: tokens of solved problems before each."""

    figure: str
    sampling: Mapping[str, float]
    responses: int = RESPONSES // 2
    context: int | None = None


CASES = (
    Case("natural_{}", {"temperature": 1.0}, RESPONSES),
    Case("natural_{}_temperature_06", {"temperature": 0.6}),
    Case("natural_{}_top_p_095", {"temperature": 1.0, "top_p": 0.95}),
    Case("{}_at_1024", {"temperature": 1.0}, context=1024),
    Case("{}_at_16384", {"temperature": 1.0}, RESPONSES // 8, context=16_384),
)
SMOKE_CASES = (Case("natural_{}", {"temperature": 1.0}, 8), Case("{}_at_512", {"temperature": 1.0}, 8, context=512))
MOST_CONTEXTS = 16  # at once, and different ones; each is asked several times


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


def natural(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """Accept lengths of one server by each of its arms, after each case."""
    whole = has_gpu() and not arguments.smoke
    arms, cases, longest = (NATURAL_ARMS, CASES, LONGEST) if whole else ((CHAIN_3,), SMOKE_CASES, 96)
    sizes = AT_ONCE if whole else AT_ONCE[:3]
    most = {arm: sizes_of(arm, sizes)[-1] if has_gpu() else sizes[-1] for arm in arms}
    group = [side for side in fixed(most, sizes[-1]) if side.drafts]
    held = max(HELD * sizes[-1], (max(case.context or 0 for case in cases) + HELD) * MOST_CONTEXTS)
    site = Site(models.target, models.drafter, logs, sizes, held, flags=NATURAL_FLAGS)
    figures: Figures = {}
    strategies = Strategies()
    with side_by_side(group, site) as servers:
        server = servers[group[0].server]
        for side in group:
            for case in cases if side.name.startswith("chain") else cases[:1]:
                began = time.monotonic()
                with awake(server), strategies.active(server, side):
                    accepted = _accepted(server, models, case, longest, side.max_batch)
                figures[f"accept_length_{case.figure.format(side.name)}"] = accepted
                out.print(f"{case.figure.format(side.name)}: {accepted:.3f}, in {time.monotonic() - began:.0f} s")
                yield figures | {"requests": server.requests, "failed_requests": server.failed}


def _accepted(server: Server, models: Models, case: Case, longest: int, most: int) -> float:
    """Tokens a verify pass of all responses together."""
    different = case.responses // GROUP if case.context is None else min(MOST_CONTEXTS, case.responses)
    prompts = models.prompts(different, case.context) * (case.responses // different)
    params = {**case.sampling, "max_new_tokens": longest}
    at_once = most if case.context is None else min(most, MOST_CONTEXTS)
    # in waves: with prompts so short, requests that follow one another would be prefilled for most of the time
    answers = server.ask([(prompt, params) for prompt in prompts], at_once=at_once, together=at_once)
    made = [answer["meta_info"] for answer in answers if answer is not None]
    if len(made) < len(answers):
        raise ServerFailed(
            f"{case.figure}: {len(answers) - len(made)} requests failed, and what they gave is not known"
        )
    return sum(each["completion_tokens"] - 1 for each in made) / sum(each["spec_verify_ct"] for each in made)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """The figures of one of the two halves."""
    if arguments.natural:
        yield from natural(models, logs, arguments)
    else:
        yield simulated(models, logs, arguments)


def summary(figures: Figures) -> Figures:
    """What is claimed of long contexts: chain 3's accept lengths there."""
    begin = f"accept_length_{name_of(CHAIN_3)}_at_"
    return {name.replace(begin, "accept_length_at_"): v for name, v in figures.items() if name.startswith(begin)}


def main(argv: Sequence[str]) -> None:
    flags = parser("accept_length", __doc__)
    flags.add_argument("--natural", action="store_true", help="what is accepted, to natural ends; not simulated")
    parts.main(flags, argv, measured, summary, tables.accept_length)
