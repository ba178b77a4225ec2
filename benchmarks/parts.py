"""A benchmark of more minutes than one command may take: each part keeps a result, and `--join` makes one of them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markdown import Markdown

from benchmarks import command, tables
from benchmarks.command import Measure, out
from tlt_server import results
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result

SUMMED = ("requests", "failed_requests")


def joined(parts: Sequence[Result], summary: Callable[[Figures], Figures]) -> Result:
    """One result of several parts, with the first one's command.

    Args:
        summary: the figures that are of all parts together, made anew.

    Raises:
        ConfigError: they are of several benchmarks, machines or revisions, or two of them measured the same.
    """
    tables.require_one_origin(parts, of=("name", "machine", "revision"))
    figures: Figures = {}
    for part in parts:
        whole = summary(part.figures)
        own = {name: value for name, value in part.figures.items() if name not in whole and name not in SUMMED}
        if twice := sorted(own.keys() & figures.keys()):
            raise ConfigError(f"{twice[0]}: two parts have it. Join parts that measured different things")
        figures |= own
    figures |= {name: sum(part.figures[name] for part in parts) for name in SUMMED}
    first = parts[0]
    made = results.measured_here(first.name, first.argv, figures | summary(figures))
    return Result(
        name=made.name,
        date=max(part.date for part in parts),
        machine=first.machine,
        versions=first.versions,
        revision=first.revision,
        argv=first.argv,
        figures=made.figures,
    )


def main(
    flags: argparse.ArgumentParser,
    argv: Sequence[str],
    measure: Measure,
    summary: Callable[[Figures], Figures],
    table: Callable[[Result], str],
) -> None:
    """A part, measured; or parts, joined."""
    flags.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="makes one result of parts' results")
    arguments = flags.parse_args(argv)
    name = flags.prog.rpartition(".")[2].removeprefix("bench_")

    def join() -> Result:
        made = joined([results.read(path) for path in arguments.join], summary)
        out.print(Markdown(table(made)))
        return made

    def part(*given: object) -> Figures:
        figures = measure(*given)  # type: ignore[arg-type]
        return figures | summary(figures)

    if arguments.join:
        command.run(name, arguments, join)
    else:
        command.main(name, None, argv, part, table, flags)
