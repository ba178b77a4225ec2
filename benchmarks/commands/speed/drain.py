"""A batch of rollouts drains: how much sooner is it done, and how near does the bandit come to an oracle?

    python -m benchmarks drain --upstream /tmp/upstream --requests 128 --json part1.json
    python -m benchmarks drain --upstream /tmp/upstream --requests 512 --json part2.json
    python -m benchmarks drain --join part1.json part2.json --json benchmarks/results/drain.h200.json

1. plain decoding and each arm by itself drain the batch: the offline sweep. From what their steps took and gave follow
   the best arm of each batch size (`table`), and the arm and threshold of an elastic rule (`elastic`)
2. all sides drain it in rounds: those, both bandits, a server without speculation, SGLang's --speculative-adaptive.
   Sides that change arms drain it several times a round: when the last request ends is a matter of luck
3. all steps that arms by themselves took in this run are replayed: the oracle has the best of them at each batch size
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.commands.speed.strategy import ADAPTIVE, BANDIT, RESERVED, sides
from benchmarks.lib import parts, tables
from benchmarks.lib.command import Models, out, parser, positive
from benchmarks.lib.comparison import PLAIN
from benchmarks.lib.draining import DecodeStep, Speeds, decode_seconds, decode_steps, trace
from benchmarks.lib.servers import Request, logging_steps
from benchmarks.lib.sides import Side, SideServer, Site, awake, name_of, servers_of, side_by_side
from benchmarks.lib.strategies import OFF, Strategies, by_batch, name_of_choice, selection
from benchmarks.lib.training.lengths import GROUP, PROBLEMS, kept
from tlt_server.config import Arm
from tlt_server.engine.decode.steplog import SettledStep, read_steps
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu
from tlt_server.process import tail
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs", "tlt_server/strategy")
REQUESTS = (128, 512)
CPU_REQUESTS = (16,)
SMOKE_REQUESTS = (4,)
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CPU_SIZES = (1, 2, 4, 8, 16, 32)
SWEEPS = 2
TIMES = 4  # a round, of a side that changes arms
BINS = 40
ELASTIC, TABLE = "elastic", "table"


class Drained(NamedTuple):
    """One drain: seconds until the last answer, and its steps, of a server that logs them; of one that learns, what
    choosing took of a step in its last thousand."""

    seconds: float
    steps: list[SettledStep]
    selecting_us: float | None = None


def work(models: Models, count: int, shorter: int = 1) -> list[Request]:
    """Requests to the embedded task, each as long as one of the embedded target's own responses to that problem.

    The same lengths for every side, past every end: else what each samples would decide how much it has to do.
    """
    prompts, lengths = models.prompts(PROBLEMS), kept()
    pairs = [(i, i * GROUP + j) for j in range(GROUP) for i in range(PROBLEMS)][:count]
    lasts = [(prompts[i], max(2, (lengths[at].total - lengths[at].prompt) // shorter)) for i, at in pairs]
    return [(prompt, {"temperature": 1.0, "max_new_tokens": n, "ignore_eos": True}) for prompt, n in lasts]


class Bench:
    """Servers, and how their sides drain a batch.

    strategies: what the sides have learned, of other batches too.
    step_log: of the server with arms.
    """

    def __init__(
        self,
        servers: Mapping[str, SideServer],
        strategies: Strategies,
        requests: Sequence[Request],
        step_log: Path,
    ) -> None:
        self._servers, self._strategies, self._requests, self._log = servers, strategies, requests, step_log
        self.lengths = [int(params["max_new_tokens"]) - 1 for _, params in requests]  # the first is the prefill's

    def drains(self, side: Side, times: int = 1) -> list[Drained]:
        """So many times; a side that learns has drained the batch once before, unmeasured.

        Raises:
            ServerFailed: a request failed.
        """
        server = self._servers[side.server]
        with awake(server), self._strategies.in_force(server, side):
            if side.learns:
                self._ask(server)
            return [self._drain(side, server) for _ in range(times)]

    def _drain(self, side: Side, server: SideServer) -> Drained:
        since = self._log.stat().st_size if side.arms else 0
        began = time.monotonic()
        self._ask(server)
        took = time.monotonic() - began
        out.print(f"{side.name}, {len(self._requests)} requests: {took:.2f} s")
        selecting_us = selection(server).selecting_us if side.learns else None
        return Drained(took, read_steps(self._log, since) if side.arms else [], selecting_us)

    def warm_up(self, side: Side) -> None:
        """Kernels are compiled, prompts prefilled."""
        server = self._servers[side.server]
        with awake(server), self._strategies.in_force(server, side):
            self._ask(server, most=16)

    def _ask(self, server: SideServer, most: int | None = None) -> None:
        requests = self._requests
        if most is not None:
            requests = [(prompt, {**params, "max_new_tokens": most}) for prompt, params in requests]
        server.ask(requests, at_once=len(requests), together=len(requests))
        if server.failed:
            raise ServerFailed(f"a drain failed; the end of {server.log}:\n{tail(server.log)}")


def rivals(known: Speeds, lengths: Sequence[int], most: Mapping[Arm, int]) -> list[Side]:
    """The elastic rule and the table that a sweep gives.

    Args:
        most: the largest batch size of each arm.
    """
    arm, threshold = known.elastic(lengths, most)
    best = known.table()
    told = ", ".join(f"{name_of_choice(choice)} from {first}" for first, choice in best.items())
    out.print(f"elastic: {name_of_choice(arm)} up to {threshold}; table: {told}")
    return [by_batch(ELASTIC, tuple(most), {1: arm, threshold + 1: None}), by_batch(TABLE, tuple(most), best)]


def drains(bench: Bench, group: Sequence[Side], sizes: Sequence[int], rounds: int) -> Iterator[Figures]:
    """All figures of one number of requests, after each round."""
    fixed = [side for side in group if side.arms and not side.learns]
    for side in group:
        bench.warm_up(side)
    seen = [step for side in fixed for drained in bench.drains(side, SWEEPS) for step in decode_steps(drained.steps)]
    limits = {side.name: side.max_batch for side in fixed}
    most = {arm: limits[name_of(arm)] for arm in fixed[0].arms}
    everyone = [*group, *rivals(Speeds(seen, sizes), bench.lengths, most)]
    changing = [side for side in everyone if side.arms and side not in fixed]
    found: dict[str, list[list[Drained]]] = defaultdict(list)
    for number in range(rounds):
        first = number % len(everyone)
        for side in [*everyone[first:], *everyone[:first]]:
            found[side.name].append(bench.drains(side, TIMES if side in changing else 1))
        seen += [step for side in fixed for each in found[side.name][-1] for step in decode_steps(each.steps)]
        figures = drain_figures(found, [side.name for side in fixed], Speeds(seen, sizes), bench.lengths)
        yield figures | {f"rounds_{len(bench.lengths)}": number + 1}


def drain_figures(
    found: Mapping[str, Sequence[Sequence[Drained]]], fixed: Sequence[str], known: Speeds, lengths: Sequence[int]
) -> Figures:
    """Times and speed-ups of all sides; the bandit against the others and the oracle.

    Args:
        found: drains of each side, by round, in which it may have had several.
        fixed: sides of one arm, or off.
        known: from all their steps.
    """
    count, figures = len(lengths), Figures()
    for side, rounds in found.items():
        figures[f"drain_s_{side}_{count}"] = median(each.seconds for each in chain(*rounds))
        over = _ratios(found, PLAIN, side)
        if side != PLAIN:
            figures |= {f"speedup_{side}_drain_{count}": median(over), f"speedup_min_{side}_drain_{count}": min(over)}
            figures |= {f"speedup_max_{side}_drain_{count}": max(over)}
    best = min(fixed, key=lambda side: figures[f"drain_s_{side}_{count}"])
    others = {"adaptive": ADAPTIVE, "best_arm": best, ELASTIC: ELASTIC, TABLE: TABLE, "paper": "paper"}
    for name, side in others.items():
        if side in found:
            figures[f"drain_ratio_to_{name}_{count}"] = median(_ratios(found, side, BANDIT))
    oracle = known.replay(lengths, known.best)
    figures[f"drain_oracle_s_{count}"] = oracle
    ours = [each.steps for each in chain(*found[BANDIT])]
    figures[f"drain_ratio_to_oracle_{count}"] = median(oracle / decode_seconds(steps) for steps in ours)
    figures[f"drain_lost_{count}"] = median(known.lost(decode_steps(steps)) for steps in ours)
    figures[f"drains_{BANDIT}_{count}"] = len(ours)
    if selecting := [each.selecting_us for each in chain(*found[BANDIT]) if each.selecting_us is not None]:
        figures[f"selecting_us_{count}"] = median(selecting)
    plain = [decode_seconds(each.steps) for each in chain(*found[OFF])]
    # how well the replay tells a drain's time: 1 is exactly
    figures[f"drain_replay_{OFF}_{count}"] = known.replay(lengths, lambda _: None) / median(plain)
    return figures | trace_figures(decode_steps(ours[-1]), count)


def _ratios(found: Mapping[str, Sequence[Sequence[Drained]]], side: str, base: str) -> list[float]:
    """How much longer a side takes than another, round by round."""
    times = ([median(each.seconds for each in drains) for drains in found[name]] for name in (side, base))
    return [ours / theirs for ours, theirs in zip(*times, strict=True)]


def trace_figures(steps: Sequence[DecodeStep], count: int) -> Figures:
    """One of the bandit's drains, over time."""
    figures: Figures = {}
    for number, each in enumerate(trace(steps, BINS)):
        name = f"trace_{count}_{number:02}"
        figures |= {f"{name}_end_s": each.end_s, f"{name}_running": each.running}
        figures[f"{name}_tokens_per_s"] = each.tokens_per_s
        figures |= {f"{name}_steps_{name_of_choice(arm)}": steps for arm, steps in each.steps.items()}
    return figures


def summary(figures: Figures) -> Figures:
    """The bandit's speed-ups over the plain server."""
    begin = f"speedup_{BANDIT}_drain_"
    return {f"drain_speedup_{name.removeprefix(begin)}": figures[name] for name in figures if name.startswith(begin)}


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures of the batches asked for, after each round."""
    sizes = SIZES if has_gpu() else CPU_SIZES
    every = SMOKE_REQUESTS if arguments.smoke else REQUESTS if has_gpu() else CPU_REQUESTS
    counts = arguments.requests or every
    step_log = logs / "steps.jsonl"
    flags = tuple(logging_steps(step_log))
    known = sides(sizes, bool(arguments.upstream), arguments.smoke)
    group = [replace(side, flags=flags) if side.arms else side for side in known]
    shorter = 4 if arguments.smoke else 1
    batches = {count: work(models, count, shorter) for count in counts}
    held = max(sum(int(p["max_new_tokens"]) + RESERVED for _, p in each) for each in batches.values())
    site = Site(models.target, models.drafter, logs, sizes, held, arguments.upstream, 2048)
    figures: Figures = {}
    strategies = Strategies()
    with side_by_side(group, site) as servers:
        for count, requests in batches.items():
            bench = Bench(servers, strategies, requests, step_log)
            captured = [size for size in sizes if size <= count]
            for found in drains(bench, group, captured, 1 if arguments.smoke else arguments.rounds):
                figures |= found
                asked = [servers[side.server] for side in servers_of(group)]
                totals = {"requests": sum(s.requests for s in asked), "failed_requests": sum(s.failed for s in asked)}
                yield figures | totals


def table(result: Result) -> str:
    """Seconds and speed-up of each side by requests, and what the bandit reaches of others."""
    figures = result.figures
    begin = f"drain_s_{PLAIN}_"
    counts = sorted((name.removeprefix(begin) for name in figures if name.startswith(begin)), key=int)
    names = dict.fromkeys(name[len("drain_s_") :].rpartition("_")[0] for name in figures if name.startswith("drain_s_"))
    rows = []
    for side in names:
        title = {ADAPTIVE: "SGLang, adaptive"}.get(side) or (tables.label(side) if "_" in side else side)
        cells = zip(
            *(tables.cells(figures, what, counts) for what in (f"drain_s_{side}", f"speedup_{side}_drain")), strict=True
        )
        rows.append([title, *(cell for pair in cells for cell in pair)])
    header = ["", *(text for count in counts for text in (f"{count} requests, s", "speed-up"))]
    against = [
        [f"bandit / {other}", *tables.cells(figures, f"drain_ratio_to_{other}", counts, ".3f")]
        for other in ("oracle", "adaptive", "best_arm", ELASTIC, TABLE, "paper")
        if any(f"drain_ratio_to_{other}_{count}" in figures for count in counts)
    ]
    ratios = tables.table(["ratio of speeds", *(f"{count} requests" for count in counts)], against)
    return "\n\n".join((tables.caption(result), tables.table(header, rows), ratios))


def main(argv: Sequence[str]) -> None:
    flags = parser("drain", __doc__)
    flags.add_argument(
        "--requests", type=positive, nargs="+", metavar="N", help="how many drain at once (default: all)"
    )
    parts.main(flags, argv, measured, summary, table)
