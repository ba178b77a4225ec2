"""How large is the project, how long do its checks take, and what was it before?

    python -m benchmarks house --before 5dded49 --time check test ci --with coverage.json --json house.json

Figures of `--before` end in `_before`. `--with` takes figures of other commands: JSON of `make coverage`, or a result.
Without `simulator_plays` among them, the simulator is run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.markdown import Markdown

from benchmarks.lib.command import out, run
from benchmarks.lib.project.ages import TOP
from benchmarks.lib.project.tree import sizes
from benchmarks.lib.tables import table
from tlt_server import results
from tlt_server.errors import ConfigError, ServerFailed
from tlt_server.results import Figures, Result

TIMED = {"check": ["make", "check"], "test": ["make", "test"], "ci": [".ci/run"]}
SEEDS = 6
SIMULATE = ["simulate", "--seeds", str(SEEDS), "--batches", "1", "8", "64"]


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A worktree of it, for a while.

    Raises:
        ConfigError: git has no such revision here.
    """
    git = ["git", "-C", str(TOP), "worktree"]
    with tempfile.TemporaryDirectory(prefix="tlt-house-") as scratch:
        tree = Path(scratch) / "tree"
        made = subprocess.run(
            [*git, "add", "--detach", str(tree), revision], check=False, capture_output=True, text=True
        )
        if made.returncode:
            raise ConfigError(f"--before {revision}: {made.stderr.strip().splitlines()[-1]}; name one of git log's")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def figures_in(path: Path) -> Figures:
    """Of a result, or of flat JSON.

    Raises:
        ConfigError: it is neither.
    """
    try:
        said = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        return msgspec.convert(said.get("figures", said), Figures)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--with {path}: {error}; it takes JSON of names and numbers, or a result") from error


def seconds_of(name: str) -> float:
    """How long a check takes.

    Raises:
        ServerFailed: it fails.
    """
    began = time.monotonic()
    ended = subprocess.run(TIMED[name], cwd=TOP, check=False)
    if ended.returncode:
        raise ServerFailed(f"{' '.join(TIMED[name])} ended with {ended.returncode}: its time would say nothing")
    return round(time.monotonic() - began, 1)


def simulated() -> Figures:
    """Plays of the simulator in mode `bandit`, and how many of them pass."""
    with tempfile.TemporaryDirectory(prefix="tlt-house-") as scratch:
        kept = Path(scratch) / "simulate.json"
        subprocess.run([sys.executable, "-m", "benchmarks", *SIMULATE, "--json", str(kept)], cwd=TOP, check=True)
        return plays(results.read(kept).figures, SEEDS)


def plays(figures: Mapping[str, float], seeds: int) -> Figures:
    rates = [rate for name, rate in figures.items() if name.startswith("pass_rate_") and name.endswith("_bandit")]
    return {"simulator_passed": round(sum(rates) * seeds), "simulator_plays": len(rates) * seeds}


def measured(arguments: argparse.Namespace) -> Figures:
    """All figures: sizes first, then what takes minutes."""
    figures = sizes(TOP)
    if arguments.before:
        with checkout(arguments.before) as tree:
            figures |= {f"{name}_before": value for name, value in sizes(tree).items() if "_to_" not in name}
    for path in arguments.given:
        figures |= figures_in(path)
    if "simulator_plays" not in figures:
        figures |= simulated()
    return figures | {f"{name}_s": seconds_of(name) for name in arguments.time}


def shown(result: Result) -> str:
    """Now and before, side by side."""
    figures = result.figures
    names = [name for name in figures if not name.endswith("_before")]
    rows = [
        [name, *(f"{figures[key]:,}" if key in figures else "" for key in (name, f"{name}_before"))] for name in names
    ]
    return table(["figure", "now", "before"], rows)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks house", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    parser.add_argument("--before", metavar="REV", help="a revision to compare with")
    parser.add_argument("--time", nargs="+", choices=TIMED, default=[], help="runs these checks, and times them")
    parser.add_argument("--with", dest="given", type=Path, nargs="+", default=[], metavar="FILE", help="more figures")
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        result = results.measured_here("house", [*parser.prog.split(), *argv], measured(arguments))
        out.print(Markdown(shown(result)))
        return result

    run("house", arguments, measure)
