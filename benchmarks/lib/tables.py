"""Kept results as Markdown; a cell that was not measured is empty. docs/results say what each figure is."""

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result

THEN = "&&"
"""Between the commands of a result that was joined of several."""
RESULTS = Path(__file__).parents[1] / "results"
_MEASURED = re.compile(r"tokens_per_s_(\w+?)_((?:context_\d+_)?batch_\d+)")


def require_one_origin(results: Iterable[Result], of: Sequence[str] = ("machine", "revision")) -> None:
    """Figures of one table are of one machine and one revision; of tables that are read together, of one machine.

    Raises:
        ConfigError: they are not.
    """
    for one, other in pairwise(results):
        for what in of:
            here, there = getattr(one, what), getattr(other, what)
            if here != there:
                raise ConfigError(
                    f"{one.name} is of {what} {here!r}, {other.name} of {there!r}: they cannot be compared. "
                    f"Measure both on one {what}"
                )


def sides_and_loads(figures: Figures) -> tuple[list[str], list[str]]:
    """The names of what was measured, ordered by kind, then by the numbers in them."""
    found = [match.groups() for name in figures if (match := _MEASURED.fullmatch(name))]
    sides, loads = ({pair[i] for pair in found} for i in range(2))
    return sorted(sides, key=_kind_and_numbers), sorted(loads, key=_kind_and_numbers)


def _kind_and_numbers(name: str) -> tuple[str, list[int]]:
    return re.sub(r"\d+", "", name), numbers_in(name)


def numbers_in(name: str) -> list[int]:
    """[512, 8] of `context_512_batch_8`."""
    return [int(number) for number in re.findall(r"\d+", name)]


def arms_of(sides: Iterable[str], prefix: str = "") -> list[str]:
    """Those of the sides that draft with one arm throughout: ours, or with the prefix `upstream_` SGLang's."""
    return [side for side in sides if side.startswith((f"{prefix}chain_", f"{prefix}tree_"))]


def label(side: str) -> str:
    """`chain 3,1,4` of `chain_3` or `chain_3_accept_4`, `SGLang, chain 3,1,4` of `upstream_chain_3`: the numbers are
    those that --arm takes."""
    if side.startswith("upstream_"):
        return f"SGLang, {label(side.removeprefix('upstream_'))}"
    if "_" not in side:
        return side
    kind, *numbers = side.split("_")
    return f"chain {numbers[0]},1,{int(numbers[0]) + 1}" if kind == "chain" else f"{kind} {','.join(numbers)}"


def origin(result: Result) -> str:
    """The command; where, of what and when it was run."""
    versions = ", ".join(f"{package} {version}" for package, version in result.versions.items())
    dirty = " with uncommitted changes" if result.revision.endswith("+") else ""
    return (
        f"`{command_of(result)}`\n\n{result.machine}; {versions}; revision {result.revision[:9]}{dirty}; "
        f"{result.date[:10]}."
    )


def command_of(result: Result) -> str:
    """As it is called today: results of before 2026-11-24 name modules, as `benchmarks.bench_drain`."""
    commands = [shlex.join(words) for then, words in groupby(result.argv, THEN.__eq__) if not then]
    return re.sub(r"-m benchmarks\.(bench_)?", "-m benchmarks ", f" {THEN} ".join(commands))


def caption(result: Result) -> str:
    """The origin; what failed; how far rounds differ."""
    figures = result.figures
    failed = f"{figures['failed_requests']:,} of {figures['requests']:,} requests failed."
    return f"{origin(result)} {failed} {_spread(figures)}"


def _spread(figures: Figures) -> str:
    widths = [
        value - figures[name.replace("_max_", "_min_")] for name, value in figures.items() if "speedup_max_" in name
    ]
    if not any(widths):
        rounds = {int(value) for name, value in figures.items() if name.startswith("rounds")}
        if min(rounds, default=1) == 1:
            return "One round: its spread is not known."
        return f"Medians of {' to '.join(map(str, sorted({min(rounds), max(rounds)})))} rounds."
    middle, widest = median(widths) / 2, max(widths) / 2
    return f"Between rounds, a speed-up varies by ±{middle:.2f} in the median cell, by ±{widest:.2f} at most."


def speedup(result: Result) -> str:
    """Speed-up over plain decoding by arm and batch; then the accept lengths that break even, and those reached."""
    figures = result.figures
    sides, loads = sides_and_loads(figures)
    arms = arms_of(sides)
    best = {load: best_arm(figures, arms, load) for load in loads}
    rows = []
    for arm in arms:
        shown = zip(loads, cells(figures, f"speedup_{arm}", loads), strict=True)
        rows.append([label(arm), *(f"**{cell}**" if arm == best[load] else cell for load, cell in shown)])
    if arms_of(sides, "upstream_"):
        peers = {"its best arm": "upstream", "adaptive": "upstream_adaptive", "plain": "upstream_plain"}
        rows += [[f"SGLang, {what}", *cells(figures, f"speedup_{side}", loads)] for what, side in peers.items()]
    rows.append(["plain, tokens/s", *cells(figures, "tokens_per_s_plain", loads, ",.0f")])
    rows.append(["plain, ms per step", *cells(figures, "step_ms_plain", loads, ".1f")])
    lengths = []
    for arm in arms:
        pairs = zip(*(cells(figures, f"{what}_{arm}", loads) for what in ("break_even", "accept_length")), strict=True)
        lengths.append([label(arm), *(" / ".join(filter(None, pair)) for pair in pairs)])
    batches = [f"batch {numbers_in(load)[0]}" for load in loads]
    tables = (table(["speed-up", *batches], rows), table(["accept length: needed / reached", *batches], lengths))
    return "\n\n".join((caption(result), *tables))


def headline(result: Result) -> str:
    """At each batch size SGLang's best arm and its adaptive mode, our best arm, and the bandit."""
    figures = result.figures
    sides, loads = sides_and_loads(figures)
    columns = [
        [str(numbers_in(load)[0]) for load in loads],
        cells(figures, "tokens_per_s_plain", loads, ",.0f"),
        *(_of_best(figures, arms_of(sides, prefix), loads) for prefix in ("upstream_", "")),
        cells(figures, "speedup_upstream_adaptive", loads),
        cells(figures, "speedup_bandit", loads),
    ]
    header = ["requests", "plain, tokens/s", "SGLang, best arm", "our best arm", "SGLang, adaptive", "our bandit"]
    origin = f"{result.machine}; revision {result.revision[:9]}; {result.date[:10]}."
    return f"{origin} {_spread(figures)}\n\n{table(header, list(zip(*columns, strict=True)))}"


def _of_best(figures: Figures, arms: Sequence[str], loads: Sequence[str]) -> list[str]:
    """The speed-up of the best of some arms, and which it is."""
    best = [(best_arm(figures, arms, load), load) for load in loads]
    return [f"{figures[f'speedup_{arm}_{load}']:.2f} ({label(arm).split()[-1]})" if arm else "" for arm, load in best]


def accept_length(result: Result) -> str:
    """What arms reach to natural ends; then, by simulated accept length and batch size, speed-up and a step's time."""
    natural = [
        [name.removeprefix("accept_length_").replace("_", " "), f"{value:.2f}"]
        for name, value in result.figures.items()
        if name.startswith("accept_length_natural_") or "_at_" in name.removeprefix("accept_length_at_")
    ]
    sides, loads = sides_and_loads(result.figures)
    made = [caption(result)] + ([table(["tokens a verify pass", ""], natural)] if natural else [])
    return "\n\n".join(made + (_simulated(result.figures, arms_of(sides), loads) if loads else []))


def _simulated(figures: Figures, arms: Sequence[str], loads: Sequence[str]) -> list[str]:
    """A length is shown with the shallowest arm that it was simulated with; what breaks even, from an arm's longest."""
    simulated = [(label(side), numbers_in(side)[-1], side) for side in arms]
    shallowest = {length: (arm, side) for arm, length, side in reversed(simulated)}
    rows = [
        [str(length), arm, *cells(figures, f"speedup_{side}", loads)]
        for length, (arm, side) in sorted(shallowest.items())
    ]
    longest = {arm: side for arm, _, side in simulated}
    rows += [["breaks even", arm, *cells(figures, f"break_even_{side}", loads)] for arm, side in longest.items()]
    steps = [[arm, *cells(figures, f"step_ms_{side}", loads, ".2f")] for arm, side in longest.items()]
    batches = [f"batch {numbers_in(load)[0]}" for load in loads]
    return [table(["speed-up at accept length", "arm", *batches], rows), table(["ms per step", *batches], steps)]


def context(result: Result) -> str:
    """Speed-up over plain decoding by context and batch size; accept lengths that break even, and those reached."""
    figures = result.figures
    sides, loads = sides_and_loads(figures)
    header = ["context", "batch", "plain, ms per step"]
    columns = [[f"{numbers_in(load)[i]:,}" for load in loads] for i in range(2)]
    columns.append(cells(figures, "step_ms_plain", loads, ".1f"))
    for side in [*arms_of(sides), *(side for side in ("off", "bandit") if side in sides)]:
        arm, _, simulated = side.partition("_accept_")
        title = label(arm)
        header.append(f"{title} at accept length {simulated}" if simulated else title)
        columns.append(cells(figures, f"speedup_{side}", loads))
        if "_" in arm:
            reached = (cells(figures, f"{what}_{side}", loads) for what in ("break_even", "accept_length"))
            header.append("needed / reached")
            columns.append([" / ".join(filter(None, pair)) for pair in zip(*reached, strict=True)])
    return f"{caption(result)}\n\n{table(header, list(zip(*columns, strict=True)))}"


def best_arm(figures: Figures, arms: Iterable[str], load: str) -> str | None:
    """The one of the greatest speed-up at a load; None if none was measured."""
    measured = [arm for arm in arms if f"speedup_{arm}_{load}" in figures]
    return max(measured, key=lambda arm: figures[f"speedup_{arm}_{load}"], default=None)


def cells(figures: Figures, what: str, loads: Sequence[str], form: str = ".2f") -> list[str]:
    names = [f"{what}_{load}" for load in loads]
    return [format(figures[name], form) if name in figures else "" for name in names]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
