"""What the demo's second part shows while it runs, and at its end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from tlt_client import Status

from tlt_server.results import Figures

Row = Mapping[str, float | int]
"""Of one RL step; its keys are those of COLUMNS."""

COLUMNS = {
    "reward": ("reward", ".2f"),
    "response_length": ("response, tokens", ".0f"),
    "accept_length": ("accept length", ".2f"),
    "tokens_per_s": ("tokens/s", ".0f"),
    "target_version": ("target", "d"),
    "drafter_version": ("drafter", "d"),
}


class Now(NamedTuple):
    """How server and drafter trainer stand."""

    server: Status
    trainer_state: str
    trainer_steps: int
    tokens_received: int


class View:
    """A screen that follows the loop; on what is no terminal, a line for each step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._said = console, steps, 0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def show(self, rows: Sequence[Row], now: Now | None) -> None:
        """All steps that are done, and what goes on; None: nobody could say, and the lines stay as they are."""
        if self._live is not None:
            if now is not None:
                self._live.update(
                    Group(table(rows, f"RL, {len(rows)} of {self._steps} steps"), *lines(now)), refresh=True
                )
            return
        for number, row in enumerate(rows[self._said :], start=self._said + 1):
            said = ", ".join(f"{head} {row[name]:{form}}" for name, (head, form) in COLUMNS.items())
            self._console.print(f"step {number} of {self._steps}: {said}")
        self._said = len(rows)

    def __enter__(self) -> "View":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def table(rows: Sequence[Row], title: str) -> Table:
    """A line for each step."""
    shown = Table("step", *(head for head, _ in COLUMNS.values()), title=title)
    for number, row in enumerate(rows, start=1):
        shown.add_row(str(number), *(f"{row[name]:{form}}" for name, (_, form) in COLUMNS.items()))
    return shown


def rows_of(figures: Figures) -> list[Row]:
    """A row for each step of a run."""
    return [
        {name: figures[f"{name}_step_{number}"] for name in COLUMNS}
        for number in range(1, int(figures["rl_steps"]) + 1)
    ]


def summary(figures: Figures) -> str:
    """The run in a few words."""
    rows = rows_of(figures)
    first, last = (row["accept_length"] for row in (rows[0], rows[-1]))
    return (
        f"Accept length in the first step, with a drafter that had learnt nothing: {first:.2f}; in the last: "
        f"{last:.2f}. {figures['drafter_versions_live']} drafters took over, and {figures['target_versions']} targets, "
        f"while it served; {figures['failed_requests']} of {figures['requests']} requests failed."
    )


def lines(now: Now) -> list[str]:
    """How it stands between two steps."""
    versions, chosen = now.server.versions, now.server.arm
    drafter = versions.drafter.live.version if versions and versions.drafter else "none"
    arm = chosen or "off"
    return [
        f"server           target {versions.target.version if versions else '?'}, drafter {drafter}, arm {arm}",
        f"                 {now.server.help}",
        f"drafter trainer  {now.trainer_state}; {now.trainer_steps} steps, {now.tokens_received} tokens received",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accept length and reward by RL step, and where another drafter was active; PNG, or what the name ends in."""
    from matplotlib.figure import Figure  # an extra's

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
