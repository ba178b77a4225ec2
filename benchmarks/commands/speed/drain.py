"""A batch of rollouts drains: how much sooner is it done, and how near does the bandit come to an oracle?

    python -m benchmarks drain --upstream /tmp/upstream --requests 128 --json part1.json
    python -m benchmarks drain --upstream /tmp/upstream --requests 512 --json part2.json
    python -m benchmarks drain --join part1.json part2.json --json benchmarks/results/drain.h200.json

1. plain decoding and each arm by itself drain the batch: the offline sweep. From what their steps took and gave follow
   the best arm of each batch size (`table`), and the arm and threshold of an elastic rule (`elastic`)
2. all sides drain it in rounds: those, both bandits, a server without speculation, SGLang's --speculative-adaptive.
   Sides that change arms drain it several times a round: when the last request ends is a matter of luck
3. all steps that arms by themselves took in this run are replayed: the oracle has the best of them at each batch size

Each response is as long as one that is kept, past its end if need be. With --natural it ends where the model ends it,
groups of 8 share a prompt, and the bandit drains warm and from a cold start, beside each arm by itself and SGLang's
static chains; an arm that lags in the first round has no others. Then responses differ in length from drain to drain,
so that times are held against plain decoding of the same lengths.
"""

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commands.speed.strategy import (
    ADAPTIVE,
    BANDIT,
    NATURAL_HELD,
    RESERVED,
    sides,
)
from benchmarks.lib import parts, tables
from benchmarks.lib.command import Models, out, parser, positive
from benchmarks.lib.comparison import LAGS, PLAIN
from benchmarks.lib.drained import COLD, ELASTIC, TABLE, Drained, drain_figures, summary
from benchmarks.lib.draining import DecodeStep, Speeds, decode_steps
from benchmarks.lib.servers import Answer, Request, logging_steps
from benchmarks.lib.sides import Side, SideServer, Site, awake, name_of, servers_of, side_by_side
from benchmarks.lib.strategies import Strategies, by_batch, name_of_choice, selection
from benchmarks.lib.training.lengths import GROUP, PROBLEMS, kept
from tlt_server.config import Arm
from tlt_server.engine.decode.steplog import read_steps
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
NATURAL_TIMES = 2
NATURAL_PEERS = {Arm(3, 1, 4): 512, Arm(7, 1, 8): 128}  # SGLang's, each up to so many requests: more would not fit
NATURAL_GROUP = 8


def natural(models: Models, count: int, shorter: int = 1) -> list[Request]:
    """Requests to the workload's task in groups, each to its natural end; run-ons end where the workload says."""
    prompts = models.prompts(-(-count // NATURAL_GROUP))
    most = models.workload.longest // shorter
    params = {"temperature": 1.0, "max_new_tokens": most}
    return [(prompts[i // NATURAL_GROUP], {**params, "sampling_seed": i}) for i in range(count)]


def recorded(models: Models, count: int, shorter: int = 1) -> list[Request]:
    """Requests to the workload's task, each as long as one of its target's own responses to that problem.

    The same lengths for every side, past every end: else what each samples would decide how much it has to do.
    """
    prompts, lengths = models.prompts(PROBLEMS), kept(models.workload)
    pairs = [(i, i * GROUP + j) for j in range(GROUP) for i in range(PROBLEMS)][:count]
    lasts = [(prompts[i], max(2, (lengths[at].total - lengths[at].prompt) // shorter)) for i, at in pairs]
    params = {"temperature": 1.0, "ignore_eos": True}
    return [(prompt, {**params, "max_new_tokens": n, "sampling_seed": i}) for i, (prompt, n) in enumerate(lasts)]


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

    def drains(self, side: Side, times: int = 1) -> list[Drained]:
        """So many times; a side that learns has drained the batch once before, unmeasured, or, cold, forgets each time.

        Raises:
            ServerFailed: a request failed.
        """
        server, found = self._servers[side.server], []
        with awake(server):
            if side.name == COLD:
                for _ in range(times):
                    self._strategies.forget(side)
                    with self._strategies.active(server, side):
                        found.append(self._drain(side, server))
                return found
            with self._strategies.active(server, side):
                if side.learns:
                    self._ask(server)
                return [self._drain(side, server) for _ in range(times)]

    def _drain(self, side: Side, server: SideServer) -> Drained:
        since = self._log.stat().st_size if side.arms else 0
        began = time.monotonic()
        answers = self._ask(server)
        took = time.monotonic() - began
        lengths = [each["meta_info"]["completion_tokens"] - 1 for each in answers if each]  # the first is the prefill's
        out.print(f"{side.name}, {len(self._requests)} requests: {took:.2f} s")
        selecting_us = selection(server).selecting_us if side.learns else None
        return Drained(took, lengths, read_steps(self._log, since) if side.arms else [], selecting_us)

    def warm_up(self, side: Side) -> None:
        """Kernels are compiled, prompts prefilled."""
        server = self._servers[side.server]
        with awake(server), self._strategies.active(server, side):
            self._ask(server, most=16)

    def _ask(self, server: SideServer, most: int | None = None) -> list[Answer | None]:
        requests = self._requests
        if most is not None:
            requests = [(prompt, {**params, "max_new_tokens": most}) for prompt, params in requests]
        answers = server.ask(requests, at_once=len(requests), together=len(requests))
        if server.failed:
            raise ServerFailed(f"a drain failed; the end of {server.log}:\n{tail(server.log)}")
        return answers


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


def drains(
    bench: Bench, what: str, group: Sequence[Side], sizes: Sequence[int], rounds: int, *, natural: bool = False
) -> Iterator[Figures]:
    """All figures of one batch, after each round. what: the batch, in their names."""
    fixed = [side for side in group if side.arms and not side.learns]
    for side in group:
        bench.warm_up(side)
    seen, asked = list[DecodeStep](), list(group)
    if not natural:
        swept = [drained for side in fixed for drained in bench.drains(side, SWEEPS)]
        seen += [step for drained in swept for step in decode_steps(drained.steps)]
        limits = {side.name: side.max_batch for side in fixed}
        most = {arm: limits[name_of(arm)] for arm in fixed[0].arms}
        asked += rivals(Speeds(seen, sizes), swept[0].lengths, most)
    changing = [side for side in asked if side.arms and side not in fixed]
    found: dict[str, list[list[Drained]]] = defaultdict(list)
    for number in range(rounds):
        first = number % len(asked)
        for side in [*asked[first:], *asked[:first]]:
            drained = bench.drains(side, (NATURAL_TIMES if natural else TIMES) if side in changing else 1)
            found[side.name].append(drained)
            seen += [step for each in drained if side in fixed for step in decode_steps(each.steps)]
        figures = drain_figures(found, [side.name for side in fixed], Speeds(seen, sizes), what)
        asked = [side for side in asked if not natural or side not in fixed or not lags(side, figures, what)]
        yield figures | {f"rounds_{what}": number + 1}


def lags(side: Side, figures: Figures, what: str) -> bool:
    """Whether an arm drains so much later than the best side that further rounds would decide nothing."""
    end = f"_drain_{what}"
    over = [v for name, v in figures.items() if re.fullmatch(rf"speedup_(?!min_|max_)\w+{end}", name)]
    return side.drafts and figures[f"speedup_{side.name}{end}"] < LAGS * max(over)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures of the batches asked for, after each round."""
    sizes = SIZES if has_gpu() else CPU_SIZES
    every = SMOKE_REQUESTS if arguments.smoke else REQUESTS if has_gpu() else CPU_REQUESTS
    counts = arguments.requests or every
    step_log = logs / "steps.jsonl"
    flags = tuple(logging_steps(step_log))
    static = [arm for arm, most in NATURAL_PEERS.items() if arguments.natural and max(counts) <= most]
    known = sides(sizes, bool(arguments.upstream), arguments.smoke, static)
    if arguments.natural:  # no server for the adaptive peer: with the static ones, it would not fit
        known = [side for side in known if side.name not in (ADAPTIVE, "paper")]
        known += [replace(side, name=COLD) for side in known if side.name == BANDIT]
    group = [replace(side, flags=flags) if side.arms else side for side in known]
    shorter = 4 if arguments.smoke else 1
    work = natural if arguments.natural else recorded
    batches = {count: work(models, count, shorter) for count in counts}
    held = max(_held(each, natural=arguments.natural) for each in batches.values())
    context = None if arguments.natural else 2048
    site = Site(
        models.target, models.drafter, logs, sizes, held, arguments.upstream, context, natural=arguments.natural
    )
    figures: Figures = {}
    strategies = Strategies()
    with side_by_side(group, site) as servers:
        for count, requests in batches.items():
            bench = Bench(servers, strategies, requests, step_log)
            captured = [size for size in sizes if size <= count]
            what = f"natural_{count}" if arguments.natural else str(count)
            rounds = 1 if arguments.smoke else arguments.rounds
            for found in drains(bench, what, group, captured, rounds, natural=arguments.natural):
                figures |= found
                asked = [servers[side.server] for side in servers_of(group)]
                totals = {"requests": sum(s.requests for s in asked), "failed_requests": sum(s.failed for s in asked)}
                yield figures | totals


def _held(requests: Sequence[Request], *, natural: bool) -> int:
    """Tokens that a KV cache needs to hold for a batch."""
    longest = [int(params["max_new_tokens"]) + RESERVED for _, params in requests]
    return max(*longest, NATURAL_HELD * len(requests)) if natural else sum(longest)


def table(result: Result) -> str:
    """Seconds and speed-up of each side by requests, and what the bandit reaches of others."""
    figures = result.figures
    begin = f"drain_s_{PLAIN}_"
    counts = [name.removeprefix(begin) for name in figures if name.startswith(begin)]
    counts.sort(key=lambda count: ("natural" in count, int(count.rpartition("_")[2])))
    sides = (name[len("drain_s_") :].rpartition("_")[0] for name in figures if name.startswith("drain_s_"))
    names = dict.fromkeys(side.removesuffix("_natural") for side in sides)
    rows = []
    for side in names:
        cells = zip(
            *(tables.cells(figures, what, counts) for what in (f"drain_s_{side}", f"speedup_{side}_drain")), strict=True
        )
        rows.append([tables.label(side), *(cell for pair in cells for cell in pair)])
    told = [f"{count.removeprefix('natural_')}{' natural' * ('natural' in count)}" for count in counts]
    header = ["", *(text for count in told for text in (f"{count} requests, s", "speed-up"))]
    against = [
        [f"bandit / {other}", *tables.cells(figures, f"drain_ratio_to_{other}", counts, ".3f")]
        for other in ("oracle", "adaptive", "best_arm", ELASTIC, TABLE, "paper")
        if any(f"drain_ratio_to_{other}_{count}" in figures for count in counts)
    ]
    ratios = tables.table(["ratio of speeds", *(f"{count} requests" for count in told)], against)
    return "\n\n".join((tables.caption(result), tables.table(header, rows), ratios))


def main(argv: Sequence[str]) -> None:
    flags = parser("drain", __doc__)
    flags.add_argument("--natural", action="store_true", help="responses end where the model ends them")
    flags.add_argument(
        "--requests", type=positive, nargs="+", metavar="N", help="how many drain at once (default: all)"
    )
    parts.main(flags, argv, measured, summary, table)
