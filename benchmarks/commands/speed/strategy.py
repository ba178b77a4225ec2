"""Is the bandit as fast as the best arm at every batch size, and never slower than plain decoding?

    python -m benchmarks strategy --upstream /tmp/upstream --batches 1 --json part1.json
    python -m benchmarks strategy --upstream /tmp/upstream --batches 2 4 8 --json part2.json
    python -m benchmarks strategy --join part1.json part2.json --json benchmarks/results/strategy.h200.json

Side by side on one machine: a server without speculation; one with several arms, which decodes by each of them alone,
by `off`, by BEG-MAB as published (`paper`) and by ours (`bandit`) in turn; and SGLang's --speculative-adaptive. Sides
that lag far behind the best at a batch size are asked in every fourth round only.

Requests all run at once, past their ends. With --natural so many are always in flight instead, each to its natural end,
SGLang's static chains stand beside the others, `paper` does not, and the plain server is SGLang's own.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import msgspec
from tlt_client.schemas import Selection

from benchmarks.commands.speed.speedup import BATCHES, CHAINS, TOKENS
from benchmarks.lib import parts, tables
from benchmarks.lib.command import Models, parser, positive
from benchmarks.lib.comparison import PLAIN, Measured, mean_rate, measuring, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.sides import Side, Site, name_of
from benchmarks.lib.strategies import OFF, fixed, learning, name_of_choice
from tlt_server.config import Arm
from tlt_server.demo.lossless import Tokens
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result
from tlt_server.strategy.settings import from_client

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs", "tlt_server/strategy")
ARMS = (*CHAINS, Arm(11, 1, 12), Arm(15, 1, 16), Arm(5, 4, 16), Arm(8, 4, 16), Arm(8, 4, 32))
CPU_ARMS = (*CHAINS[:3], Arm(3, 2, 6))
CPU_BATCHES = (1, 2, 4, 8)
NATURAL_SECONDS = {64: 3.0, 256: 6.0}  # of a visit, up to so many requests: more begin and end in waves
SMOKE_SECONDS = 4.0
NATURAL_HELD = 512  # tokens of KV cache a request: a few are far longer while most have ended
NATURAL_LEAST = 16_384  # and at least, for one that runs on
NATURAL_PEERS = {Arm(3, 1, 4): 512, Arm(7, 1, 8): 64}  # SGLang's, each up to so many requests: more would not fit
NATURAL_ADAPTIVE = 64  # and its adaptive mode
ADAPTIVE = "upstream_adaptive"
BANDIT = "bandit"
LEARN = ("paper", BANDIT)
CLAIMED = ("off_ratio_to_plain", "max_chosen_lost")
RESERVED = 192  # of each request: its prompt, and what the widest arm reserves under overlap, twice
FEW = 64  # requests: up to so many are asked longer responses, for what so few sample decides much
AT_LEAST = 8  # requests that a visit decodes, in waves where they are more than the batch
WAVES = {FEW: 4, max(BATCHES): 2}  # at least, up to so many requests: a wave is over sooner than sides have changed
_SPEEDUP = re.compile(r"speedup_(?!min_|max_)(\w+)_batch_(\d+)")


def sides(sizes: Sequence[int], upstream: bool, smoke: bool, static: Sequence[Arm] = ()) -> list[Side]:
    """All sides, the plain one first, of servers that run batches of these sizes. static: SGLang's arms beside it."""
    arms = ARMS if has_gpu() else CPU_ARMS[1:3] if smoke else CPU_ARMS
    most = {arm: sizes_of(arm, sizes)[-1] if has_gpu() else sizes[-1] for arm in arms}
    peer = Side(ADAPTIVE, CHAINS[-1], upstream=True, flags=("--speculative-adaptive",))
    plain = Side(PLAIN, max_batch=sizes[-1])
    peers = [peer, *(Side(f"upstream_{name_of(arm)}", arm, upstream=True) for arm in static)]
    return [plain, *fixed(most, sizes[-1]), *learning(arms), *(peers if upstream else [])]


def ratios(found: Measured, side: str, base: str, load: str) -> list[float]:
    """A side's rate over another's, round by round."""
    pairs = zip(found.windows.get((side, load), ()), found.windows.get((base, load), ()), strict=False)
    return [mean_rate(ours) / mean_rate(theirs) for ours, theirs in pairs if ours and theirs]


def cells(found: Measured, loads: Sequence[Load]) -> Figures:
    """Of every side at every batch size: rate, accept length, speed-up over the plain server; and what the bandit
    reaches of the best side that does not learn, which is the best by its median, not by the luck of a round."""
    figures: Figures = {}
    learn = [side.name for side in found.sides if side.learns]
    for side, load in product(found.sides, loads):
        name = f"{side.name}_{load.name}"
        windows = [window for round_ in found.windows.get((side.name, load.name), ()) for window in round_]
        if not windows:
            continue
        figures[f"tokens_per_s_{name}"] = mean_rate(windows)
        figures[f"accept_length_{name}"] = sum(window.accept_length for window in windows) / len(windows)
        figures[f"windows_{name}"] = len(windows)
        figures[f"windows_without_graph_{name}"] = sum(not window.graph for window in windows)
        if side.name != PLAIN and (over := ratios(found, side.name, PLAIN, load.name)):
            figures |= {f"speedup_{name}": median(over), f"speedup_min_{name}": min(over)}
            figures |= {f"speedup_max_{name}": max(over)}
    for load, name in product(loads, learn):
        rivals = [side.name for side in found.sides if side.arms and not side.learns]
        best = max(rivals, key=lambda rival: figures.get(f"speedup_{rival}_{load.name}", 0))
        if over := ratios(found, name, best, load.name):
            figures[f"ratio_to_best_{name}_{load.name}"] = median(over)
            figures |= {f"ratio_to_best_min_{name}_{load.name}": min(over)}
            figures |= {f"ratio_to_best_max_{name}_{load.name}": max(over)}
        figures |= chosen(found.selections.get((name, load.name), ()), name, load.batch)
    return figures


def chosen(selections: Sequence[Selection], side: str, batch: int) -> Figures:
    """Shares of the time of a side's decode steps, its warm-up among them: of each arm, and what exploration lost; and
    what choosing took of a step.

    Of an arm, in the bucket of the batch size alone: as responses end, fewer requests run, and other arms are better.
    """
    seconds: Counter[str] = Counter()
    for bucket in (bucket for each in selections for bucket in each.buckets if bucket.first <= batch <= bucket.last):
        for one in bucket.arms:
            seconds[name_of_choice(from_client(one.arm))] += one.seconds
    name, total = f"{side}_batch_{batch}", sum(seconds.values())
    figures = {f"time_{arm}_{name}": taken / total for arm, taken in seconds.items() if taken}
    if lost := sum(each.explored_lost_s for each in selections):
        figures[f"explored_lost_{name}"] = lost / sum(each.decoded_s for each in selections)
    if selecting := [each.selecting_us for each in selections if each.selecting_us is not None]:
        figures[f"selecting_us_{name}"] = median(selecting)
    return figures


def summary(figures: Figures) -> Figures:
    """What is claimed: the bandit's speed-ups, and the worst of its figures over all batch sizes."""
    speedups = {match.groups(): figures[name] for name in figures if (match := _SPEEDUP.fullmatch(name))}
    bandit = {batch: value for (side, batch), value in speedups.items() if side == BANDIT}
    made = {f"speedup_batch_{batch}": value for batch, value in bandit.items()}
    off = [value for (side, _), value in speedups.items() if side == OFF]
    best = [value for name, value in figures.items() if name.startswith(f"ratio_to_best_{BANDIT}_")]
    least = {"min_ratio_to_best": best, "min_ratio_to_plain": list(bandit.values()), "off_ratio_to_plain": off}
    made |= {name: min(values) for name, values in least.items() if values}
    lost = {batch: each for batch in bandit if (each := chosen_lost(figures, speedups, batch)) is not None}
    made |= {f"chosen_lost_batch_{batch}": each for batch, each in lost.items()}
    selecting = [value for name, value in figures.items() if name.startswith(f"selecting_us_{BANDIT}_")]
    most = {"max_chosen_lost": list(lost.values()), "selecting_us": selecting}
    return made | {name: max(values) for name, values in most.items() if values}


def chosen_lost(figures: Figures, speedups: Mapping[tuple[str, str], float], batch: str) -> float | None:
    """The share of the bandit's time that the best arm would have saved, had each the speed-up that it has by itself.

    What its choices cost, chance left out: what is accepted scatters from visit to visit by more than is in question.
    None where no arm was measured by itself.
    """
    ours = {arm: value for (arm, size), value in speedups.items() if size == batch and not arm.startswith("upstream")}
    alone = {arm: value for arm, value in ours.items() if arm not in LEARN}
    shares = {arm: figures.get(f"time_{arm}_{BANDIT}_batch_{batch}", 0.0) for arm in alone}
    if not any(shares.values()):
        return None
    made = sum(share * alone[arm] for arm, share in shares.items()) / sum(shares.values())
    return 1 - made / max(alone.values())


def load_of(prompts: Sequence[Tokens], smoke: bool) -> Load:
    """What a visit asks at a batch size, that of the prompts."""
    batch = len(prompts)
    name = f"batch_{batch}"
    if smoke:
        return Load(name, prompts, 192)  # fewer steps give no window between the first and the last
    least = next(waves for most, waves in WAVES.items() if batch <= most)
    return Load(name, prompts, length_at(batch), max(least, AT_LEAST // batch))


def natural_load(models: Models, batch: int, smoke: bool) -> Load:
    """So many requests in flight, of the same problems in the same order for every side."""
    seconds = next(each for most, each in NATURAL_SECONDS.items() if batch <= most)
    seconds = SMOKE_SECONDS if smoke else seconds
    return Load(f"batch_{batch}", models.prompts(2 * max(BATCHES)), models.workload.longest, closed=(batch, seconds))


def length_at(batch: int) -> int:
    """Tokens of each response where so many requests run at once."""
    return 2 * TOKENS if batch <= FEW else TOKENS


def held_at(sizes: Sequence[int], *, natural: bool = False) -> int:
    """Tokens that a KV cache needs to hold for any of these batches."""
    longest = {size: size * ((NATURAL_HELD if natural else length_at(size)) + RESERVED) for size in sizes}
    return max(*longest.values(), NATURAL_LEAST if natural else 0)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures of the batch sizes asked for, after each round; beside the logs, what learning sides knew by then."""
    every = BATCHES if has_gpu() else CPU_BATCHES
    batches = arguments.batches or ((1, 4) if arguments.smoke else every)
    natural = arguments.natural
    if natural:
        loads = [natural_load(models, batch, arguments.smoke) for batch in batches]
    else:
        prompts = models.prompts(max(batches))
        loads = [load_of(prompts[:batch], arguments.smoke) for batch in batches]
    context = None if natural else 2048
    # all sizes in every part: the server's own buckets depend on those it has graphs for
    held = held_at(batches if natural else every, natural=natural)
    site = Site(models.target, models.drafter, logs, every, held, arguments.upstream, context, natural=natural)
    static = [arm for arm, most in NATURAL_PEERS.items() if natural and max(batches) <= most]
    group = sides(every, bool(arguments.upstream), arguments.smoke, static)
    if natural:
        # SGLang's own plain decoding is the base: a server of ours beside it would not fit
        plain = replace(group[0], upstream=bool(arguments.upstream))
        left_out = ["paper"] if max(batches) <= NATURAL_ADAPTIVE else ["paper", ADAPTIVE]
        group = [plain, *(side for side in group[1:] if side.name not in left_out)]
    rounds = 1 if arguments.smoke else arguments.rounds
    for number, found in enumerate(measuring([group], loads, site, rounds, race=True), 1):
        known = {" ".join(turn): reports for turn, reports in found[0].selections.items() if reports}
        (logs / "selections.json").write_bytes(msgspec.json.encode(known))
        yield cells(found[0], loads) | totals(found) | {"rounds": number}


def table(result: Result) -> str:
    """Speed-up over plain decoding by strategy and batch size, the best of those that do not learn in bold."""
    figures = result.figures
    names, loads = tables.sides_and_loads(figures)
    arms = [OFF, *tables.arms_of(names)]
    best = {load: tables.best_arm(figures, arms, load) for load in loads}
    rows = []
    peers = [name for name in names if name.startswith("upstream")]
    learn = [name for name in LEARN if name in names]
    for side in [*arms, *learn, *peers]:
        shown = zip(loads, tables.cells(figures, f"speedup_{side}", loads), strict=True)
        shown_cells = (f"**{cell}**" if side == best[load] and cell else cell for load, cell in shown)
        rows.append([tables.label(side), *shown_cells])
    for side in learn:
        rows.append([f"{side} / best", *tables.cells(figures, f"ratio_to_best_{side}", loads, ".3f")])
    if any(lost := tables.cells(figures, "chosen_lost", loads, ".3f")):
        rows.append(["lost by choices", *lost])
    rows.append(["plain, tokens/s", *tables.cells(figures, "tokens_per_s_plain", loads, ",.0f")])
    header = ["speed-up", *(f"batch {tables.numbers_in(load)[0]}" for load in loads)]
    claimed = [[name, f"{figures[name]:.4f}"] for name in figures if name.startswith("min_ratio") or name in CLAIMED]
    return "\n\n".join((tables.caption(result), tables.table(header, rows), tables.table(["figure", ""], claimed)))


def main(argv: Sequence[str]) -> None:
    flags = parser("strategy", __doc__)
    flags.add_argument("--natural", action="store_true", help="responses end where the model ends them")
    flags.add_argument("--batches", type=positive, nargs="+", metavar="N", help="requests at once (default: all)")
    parts.main(flags, argv, measured, summary, table)
