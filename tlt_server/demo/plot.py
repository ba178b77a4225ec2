"""The demo's second part as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tlt_server.demo.live import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accept length and reward by RL step, and where another drafter was in force; PNG, or what the name ends in."""
    steps = range(1, len(rows) + 1)
    figure = Figure(figsize=(6.4, 4.8), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    lengths = [row["accept_length"] for row in rows]
    above.plot(steps, lengths, marker="o")
    for step, row, length in zip(steps, rows, lengths, strict=True):
        above.annotate(
            f"{row['drafter_version']:d}", (step, length), textcoords="offset points", xytext=(0, 6), ha="center"
        )
    above.set(ylabel="accept length", ylim=(1, 4), title="Numbers: the drafter's version")
    below.plot(steps, [row["reward"] for row in rows], marker="o", color="tab:green")
    below.set(ylabel="reward", xlabel="RL step", ylim=(0, 1), xticks=list(steps))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
