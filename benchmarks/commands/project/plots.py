"""Kept results as pictures, PNG and SVG.

Each holds the SHA-256 of the result that it shows, so that a test can say whether it is up to date.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.tables import RESULTS, arms_of, label, numbers_in, sides_and_loads
from tlt_server import results
from tlt_server.results import Figures, Result

STYLE = {"svg.hashsalt": "tlt-server", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
COLOURS = mpl.color_sequences["petroff10"]  # told apart by colour-blind readers too


def speedup(axes: Axes, figures: Figures) -> None:
    """By batch size, a line for each arm: ours solid, SGLang's dashed."""
    sides, loads = sides_and_loads(figures)
    ours, theirs = arms_of(sides), arms_of(sides, "upstream_")
    colours = dict(zip(ours, COLOURS, strict=False))
    for side in [*ours, *theirs]:
        style = {"label": label(side)} if side in ours else {"linestyle": "--"}
        _line(axes, figures, side, loads, color=colours[side.removeprefix("upstream_")], **style)
    if theirs:
        axes.plot([], [], color="black", linestyle="--", label="SGLang, the same arm")
        _line(axes, figures, "upstream_adaptive", loads, label="SGLang, adaptive", color="black", linestyle=":")
        _line(axes, figures, "upstream_plain", loads, label="SGLang, plain", color="gray", linestyle=":")
    axes.set(xlabel="requests decoding at once", ylabel="speed-up over plain decoding", ylim=(0, None))


def context(axes: Axes, figures: Figures) -> None:
    """By context, a line for each batch size: of the bandit and of a simulated chain; of each arm where neither is."""
    sides, loads = sides_and_loads(figures)
    batches = sorted({numbers_in(load)[1] for load in loads})
    shown = [side for side in sides if side == "bandit" or "_accept_" in side] or arms_of(sides)
    for side, linestyle in zip(shown, ("-", "--"), strict=True):
        name, _, length = side.partition("_accept_")
        title = f"{label(name)}{f' accepting {length}' if length else ''}"
        for batch, colour in zip(batches, COLOURS, strict=False):
            points = _points(figures, f"speedup_{side}", [load for load in loads if numbers_in(load)[1] == batch])
            axes.plot(*points, marker="o", ms=3, label=f"{title}, batch {batch}", color=colour, linestyle=linestyle)
    axes.set(xlabel="tokens of context", ylabel="speed-up over plain decoding", ylim=(0, None))


def _line(axes: Axes, figures: Figures, side: str, loads: Sequence[str], **style: Any) -> None:
    """A side's speed-up with the band of its rounds."""
    batches, middle = _points(figures, f"speedup_{side}", loads)
    low, high = (_points(figures, f"speedup_{end}_{side}", loads)[1] for end in ("min", "max"))
    axes.plot(batches, middle, marker="o", ms=3, **style)
    axes.fill_between(batches, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _points(figures: Figures, what: str, loads: Sequence[str]) -> tuple[list[int], list[float]]:
    """The first number of each load that was measured, and the figure."""
    measured = [load for load in loads if f"{what}_{load}" in figures]
    return [numbers_in(load)[0] for load in measured], [figures[f"{what}_{load}"] for load in measured]


def drain(figure: Figure, result: Result) -> None:
    """A column for each number of requests: those that run, the arms of their steps, and tokens/s, over time."""
    traces: dict[int, list[str]] = {}
    for name in result.figures:
        if name.startswith("trace_") and name.endswith("_end_s"):
            traces.setdefault(numbers_in(name)[0], []).append(name.removesuffix("_end_s"))
    rows = figure.subplots(3, len(traces), sharex="col", squeeze=False)
    for column, (count, bins) in enumerate(sorted(traces.items())):
        running, steps, rate = rows[:, column]
        ends = [result.figures[f"{name}_end_s"] for name in bins]
        for axes, what in ((running, "running"), (rate, "tokens_per_s")):
            axes.plot(ends, [result.figures[f"{name}_{what}"] for name in bins], color="black")
        _shares(steps, result.figures, bins, ends)
        running.set(title=f"{count} requests", ylabel="requests running", ylim=(0, None))
        steps.set(ylabel="share of the steps", ylim=(0, 1))
        rate.set(xlabel="seconds", ylabel="tokens/s", ylim=(0, None))
    handles = {text: handle for axes in rows[1] for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)


def _shares(axes: Axes, figures: Figures, bins: Sequence[str], ends: Sequence[float]) -> None:
    """Arms, each with the share of the steps that it decoded."""
    arms = sorted({name.partition("_steps_")[2] for name in figures if name.startswith("trace_") and "_steps_" in name})
    counts = [[figures.get(f"{name}_steps_{arm}", 0) for arm in arms] for name in bins]
    shares = zip(*([count / sum(each) for count in each] for each in counts), strict=True)
    labels = [label(arm) for arm in arms]
    axes.stackplot(ends, *shares, labels=labels, colors=COLOURS, step="pre")


PLOTS = {"speedup": speedup, "context": context}
OVER_TIME = {"drain": drain}


def draw(result: Result) -> Figure:
    """The picture of a result that PLOTS or OVER_TIME names."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    if result.name in OVER_TIME:
        OVER_TIME[result.name](figure, result)
    else:
        _by_load(figure, result)
    figure.text(0.01, -0.03, f"{result.machine}; revision {result.revision[:9]}; {result.date[:10]}", fontsize=7)
    return figure


def _by_load(figure: Figure, result: Result) -> None:
    """One picture with loads from left to right."""
    axes = figure.add_subplot()
    PLOTS[result.name](axes, result.figures)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = {numbers_in(load)[0]: f"{numbers_in(load)[0]:,}" for load in sides_and_loads(result.figures)[1]}
    axes.set_xticks(list(ticks), list(ticks.values()))
    figure.legend(loc="outside right upper", frameon=False)


def plotted(folder: Path) -> list[Path]:
    """The results in a folder that are drawn."""
    return sorted(path for path in folder.glob("*.json") if path.name.split(".")[0] in {*PLOTS, *OVER_TIME})


def write(path: Path, out: Path) -> None:
    """Draws one result: NAME.MACHINE.png and .svg."""
    out.mkdir(parents=True, exist_ok=True)
    source = hashlib.sha256(path.read_bytes()).hexdigest()
    with mpl.rc_context(STYLE):
        figure = draw(results.read(path))
        for end, more in (("png", {}), ("svg", {"Date": None})):
            metadata = {"Source": source, **more}
            figure.savefig(out / f"{path.stem}.{end}", metadata=metadata, bbox_inches="tight", dpi=150)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plots", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "plots", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    for path in plotted(RESULTS):
        write(path, arguments.out)
