"""What does a drafter swap under load cost, and does it change any output?

    python -m benchmarks swap --models models/7b --json benchmarks/results/swap.h200.json

Greedy streams run without a break on one server, chain (3, 1, 4), while drafters are pushed one right after another:

1. no swaps: the outputs that are expected, and the time of an undisturbed step
2. the drafter in force, pushed again and again: the control
3. good, identical and random drafters in random order, the watchdog observing
4. what the old drafter's keys and values in the cache cost in accept length, after a swap
5. the watchdog armed, a random drafter pushed: how soon it is gone
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.lib import command
from benchmarks.lib.command import EMBEDDED, Models, parser, positive
from benchmarks.lib.reload import shown
from benchmarks.lib.reload.cache import Cache, cache_figures
from benchmarks.lib.reload.leaks import held, leak_figures
from benchmarks.lib.reload.pushing import WAYS, Events, Push, Swap
from benchmarks.lib.reload.steps import Intervals, Span, cut, quantile, taken_up
from benchmarks.lib.reload.streams import Round, Streams, Verdict, beside, judged
from benchmarks.lib.reload.weights import noisy, shuffled
from benchmarks.lib.servers import Server, logging_steps
from benchmarks.lib.sides import Side, SideServer, Site, awake, on_ranks, side_by_side
from tlt_server.config import Arm
from tlt_server.demo.reference import Reference
from tlt_server.engine.decode.steplog import SettledStep, read_steps
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/weights", "tlt_server/trainer/publish", "tlt_server/link", "tlt_server/wire")
SEED = 5
NOISE = 0.005
"""Of a good drafter, as a share of each tensor's deviation: it drafts as well as the one it was made of."""
CONTEXT = 2048
LATE, LATE_MS = 1.5, 2.0
"""A step is late that takes longer than so many medians and so many milliseconds."""


class Size(NamedTuple):
    """How much to measure.

    swaps: of good, identical and random drafters.
    tokens: of each stream in a round.
    after: tokens after a swap, for which the cache's cost is told.
    undisturbed: rounds without a swap.
    control: swaps of the drafter in force.
    repeats: of each measurement of the cache. recoveries: from a random drafter.
    """

    swaps: int
    tokens: int
    after: tuple[int, ...]
    undisturbed: int
    control: int
    repeats: int
    recoveries: int


GPU = Size(swaps=300, tokens=1024, after=(16, 64, 256), undisturbed=32, control=60, repeats=2, recoveries=5)
CPU = Size(swaps=1000, tokens=200, after=(16, 64, 256), undisturbed=8, control=200, repeats=3, recoveries=5)
SMOKE = Size(swaps=8, tokens=48, after=(16,), undisturbed=2, control=4, repeats=1, recoveries=1)


@dataclass(frozen=True)
class Drafters:
    """start: the one that the server starts with. good: two that are as good, and differ. random: of no use."""

    start: Path
    good: tuple[Path, Path]
    random: Path

    @classmethod
    def make(cls, start: Path, folder: Path) -> "Drafters":
        first, second = (noisy(start, folder / f"good{seed}", seed, NOISE) for seed in (1, 2))
        return cls(start, (first, second), shuffled(start, folder / "random", 3))

    def choices(self, count: int) -> list[Path]:
        """Good, identical and random drafters in random order: identical is the one before, good the other good one."""
        draw, chosen = random.Random(SEED), [self.good[0]]
        while len(chosen) < count:
            other = self.good[chosen[-1] == self.good[0]]
            chosen.append(draw.choice([other, chosen[-1], self.random]))
        return chosen


@dataclass
class Phase:
    """Swaps and the rounds beside them."""

    swaps: list[Swap]
    rounds: list[Round]


@dataclass
class Bench:
    """What the phases share."""

    server: SideServer
    streams: Streams
    push: Push
    events: Events

    def undisturbed(self, rounds: int) -> list[Round]:
        return [self.streams.round() for _ in range(rounds)]

    def swapping(self, drafters: Sequence[Path], at: Callable[[int], None] = lambda _: None) -> Phase:
        """Pushes drafters beside the streams, each once the one before is in force; `at` is called before each."""
        swaps: list[Swap] = []

        def push_all() -> None:
            for i, drafter in enumerate(drafters):
                at(i)
                swaps.append(self.push(self.events, drafter))

        return Phase(swaps, beside(self.streams.round, push_all))


def swap_figures(steps: Sequence[SettledStep], batch: int, still: Sequence[Span], swaps: Sequence[Swap]) -> Figures:
    """Step times beside swaps, against those of spans without any.

    Args:
        batch: requests at once.
        still: when nothing was swapped.
    """
    intervals = Intervals.of(steps, batch)
    usual = intervals.median_ms(still)
    spans = [taken_up(steps, swap.span, swap.version) for swap in swaps]
    lives = [swap.span.end - swap.span.begin for swap in swaps]
    without = [piece for span in still for piece in cut(span, median(span.end - span.begin for span in spans))]
    figures: Figures = {
        "swaps": len(swaps),
        "step_ms_median": usual,
        "live_s_p50": median(lives),
        "live_s_p99": quantile(lives, 0.99),
        "staging_s_p50": median(swap.staging_s for swap in swaps),
        "flip_ms_p50": 1000 * median(swap.flip_s for swap in swaps),
    }
    for name, of in (("", spans), ("_undisturbed", without)):
        found = [each for span in of if (each := intervals.disturbance(span, usual))]
        figures[f"windows{name}"] = len(found)
        if found:
            late = [each for each in found if each.worst_ms > LATE * usual + LATE_MS]
            figures |= {
                f"windows_with_a_late_step{name}": len(late),
                f"step_ms_p99{name}": quantile([ms for each in found for ms in each.ms], 0.99),
                f"worst_step_ms_p50{name}": median(each.worst_ms for each in found),
                f"worst_step_ms_p99{name}": quantile([each.worst_ms for each in found], 0.99),
                f"lost_ms_p50{name}": median(each.lost_ms for each in found),
                f"lost_ms_p99{name}": quantile([each.lost_ms for each in found], 0.99),
            }
    return figures


def watch(server: Server, mode: str) -> None:
    """Sets what the watchdog does on a collapse: `observe` or `armed`."""
    server.http.put(f"{server.url}/tlt/v1/drafter/watchdog", json={"mode": mode}).raise_for_status()


def recoveries(bench: Bench, drafters: Drafters, times: int) -> tuple[Figures, list[Round]]:
    """How soon the watchdog has a random drafter rolled back, by the server's own word; and the rounds beside it."""
    found: list[dict[str, Any]] = []

    def push_all() -> None:
        trusted = bench.push(bench.events, drafters.start)
        bench.events.wait("drafter_kept", version=trusted.version)
        for _ in range(times):
            swap = bench.push(bench.events, drafters.random)
            found.append(bench.events.wait("drafter_rolled_back", from_version=swap.version)["detail"])

    watch(bench.server, "armed")
    rounds = beside(bench.streams.round, push_all)
    took = [each["recovery_s"] for each in found]
    figures: Figures = {
        "recoveries": len(found),
        "recovery_s": median(took),
        "recovery_s_max": max(took),
        "recovery_steps": median(each["steps"] for each in found),
    }
    return figures, rounds


def served(bench: Bench, drafters: Drafters, size: Size, swaps: int) -> tuple[Figures, dict[str, list[Round]]]:
    """All phases on a running server: figures, and the rounds to judge, by phase."""
    bench.undisturbed(2)  # kernels are compiled and prompts prefilled
    watch(bench.server, "observe")
    still = bench.undisturbed(size.undisturbed)
    control = bench.swapping([drafters.start] * size.control)
    holdings = []

    def take_stock(number: int) -> None:
        if number == swaps // 10:  # what grows once has grown by then
            holdings.append(held(bench.server.pid))

    mixed = bench.swapping(drafters.choices(swaps), take_stock)
    figures = leak_figures(holdings[0], held(bench.server.pid))
    steps, spans = read_steps(bench.streams.log), [round_.span for round_ in still]
    figures |= swap_figures(steps, len(bench.streams.prompts), spans, mixed.swaps)
    first, second = drafters.good
    pairs = {"good": (second, first), "random": (drafters.random, first)}
    longer = Streams(bench.server, bench.streams.prompts, max(size.tokens, 2 * max(size.after)), bench.streams.log)
    figures |= cache_figures(Cache(longer, bench.push, bench.events), pairs, size.after, size.repeats)
    recovery, recovering = recoveries(bench, drafters, size.recoveries)
    rounds = {"undisturbed": still, "control": control.rounds, "mixed": mixed.rounds, "recovery": recovering}
    return figures | recovery, rounds


def verdict_figures(verdicts: dict[str, Verdict]) -> Figures:
    mixed = verdicts["mixed"]
    return {
        "outputs": mixed.responses,
        "mismatched_outputs": sum(each.mismatched for each in verdicts.values()),
        "tie_rate": mixed.tie_rate,
        "tie_rate_control": verdicts["control"].tie_rate,
        "tie_rate_undisturbed": verdicts["undisturbed"].tie_rate,
    }


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures."""
    size = SMOKE if arguments.smoke else GPU if has_gpu() else CPU
    prompts = models.prompts(arguments.streams)
    with tempfile.TemporaryDirectory(prefix="tlt-drafters-") as scratch, WAYS[arguments.by](models.target) as push:
        folder = Path(scratch)
        drafters = Drafters.make(models.drafter, folder)
        log = folder / "steps.jsonl"
        side = Side("swap", Arm(3, 1, 4), flags=(*logging_steps(log), *push.flags, *on_ranks(arguments.ranks)))
        site = Site(models.target, models.drafter, logs, [len(prompts)], len(prompts) * CONTEXT, context=CONTEXT)
        with side_by_side([side], site) as servers, awake(servers["swap"]) as server:
            bench = Bench(server, Streams(server, prompts, size.tokens, log), push, Events(server))
            figures, rounds = served(bench, drafters, size, arguments.swaps or size.swaps)
    expected = rounds["undisturbed"][0].outputs
    target = cache(lambda: Reference(models.target, torch.float32, "cuda"))
    verdicts = {
        name: judged(target, prompts, expected, [round_.outputs for round_ in found]) for name, found in rounds.items()
    }
    totals: Figures = {"requests": server.requests, "failed_requests": server.failed, "streams": len(prompts)}
    return totals | verdict_figures(verdicts) | figures


def flags() -> argparse.ArgumentParser:
    found = parser("swap", __doc__, compares=False)
    gpu = has_gpu()
    found.add_argument("--swaps", type=positive, help=f"default: {(GPU if gpu else CPU).swaps}")
    found.add_argument("--streams", type=positive, default=32 if gpu else 16, help="greedy requests at once")
    found.add_argument("--ranks", type=positive, default=1, help="tensor-parallel size to serve with (default: 1)")
    found.add_argument("--by", choices=WAYS, default="path", help="how a drafter is pushed (default: path)")
    if not gpu:
        found.set_defaults(shape=EMBEDDED)
    return found


def main(argv: Sequence[str]) -> None:
    command.main("swap", __doc__, argv, measured, shown.swap, flags())
