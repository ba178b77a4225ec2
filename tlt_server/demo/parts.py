"""The demo: what speculation changes and what it does not; then the whole loop of RL training around it."""

import importlib.util
import io
from pathlib import Path

from rich.console import Console

from tlt_server.demo import run as speculation
from tlt_server.demo.live import rows_of, summary, table
from tlt_server.errors import ConfigError
from tlt_server.results import Figures

OF_THE_LOOP = ("tlt_grpo", "matplotlib")
"""Packages that the server itself does without."""


def run(part: str, problems: int, steps: int, plot: Path, console: Console) -> tuple[Figures, list[str]]:
    """Runs `speculation`, `loop` or `both`. Returns the figures, and what went wrong, a line each.

    Requests of both parts are counted together. The picture of the loop goes to `plot`. `both` does without the loop,
    and says so, where its packages are not installed.

    Raises ConfigError: `loop` needs packages that are not installed.
    """
    figures, faults = Figures(), list[str]()
    missing = next((name for name in OF_THE_LOOP if not importlib.util.find_spec(name)), None)
    if missing and part == "both":
        console.print(f"the loop of RL is left out: it {_remedy(missing)}", markup=False)
        part = "speculation"
    elif missing and part == "loop":
        raise ConfigError(f"the loop {_remedy(missing)}, or --part speculation")
    if part != "loop":
        figures = speculation.run(problems, console)
        faults = speculation.faults(figures)
    if part != "speculation":
        found, more = _loop(steps, plot, console)
        asked = {name: figures.get(name, 0) + found[name] for name in ("requests", "failed_requests")}
        figures, faults = figures | found | asked, faults + more
    return figures, faults


def _remedy(missing: str) -> str:
    return f"needs {missing}: in a checkout, pip install -e examples/grpo -e '.[demo]'"


def _loop(steps: int, plot: Path, console: Console) -> tuple[Figures, list[str]]:
    from tlt_server.demo import loop
    from tlt_server.demo.live import draw

    figures = loop.run(steps, console)
    _print_loop(figures, console)
    draw(rows_of(figures), plot)
    console.print(f"plot written to {plot}")
    return figures, loop.faults(figures)


def as_text(figures: Figures) -> str:
    """What was printed of the figures of both parts, as plain text: what the README shows of the kept result."""
    page = Console(width=90, file=io.StringIO(), record=True)
    speculation.show(figures, page)
    if "rl_steps" in figures:
        _print_loop(figures, page)
    return "\n".join(line.rstrip() for line in page.export_text().splitlines())


def _print_loop(figures: Figures, console: Console) -> None:
    console.print(table(rows_of(figures), "RL, and a drafter that is trained meanwhile"))
    console.print(summary(figures))
