"""A benchmark of more minutes than one command may take: each part keeps a result, and `--join` makes one of them."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.markdown import Markdown

from benchmarks.lib import command, tables
from benchmarks.lib.command import Models, out
from tlt_server import results
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result

SUMMED = ("requests", "failed_requests")
LEAST = ("rounds",)


def joined(parts: Sequence[Result], summary: Callable[[Figures], Figures]) -> Result:
    """One result of several parts; its command is theirs, one after another.

    Args:
        summary: the figures that are of all parts together, made anew.

    Raises:
        ConfigError: they are of several benchmarks, machines or revisions, or two of them measured the same.
    """
    tables.require_one_origin(parts, of=("name", "machine", "revision"))
    figures: Figures = {}
    for part in parts:
        whole = summary(part.figures)
        own = {name: value for name, value in part.figures.items() if name not in (*whole, *SUMMED, *LEAST)}
        if twice := sorted(own.keys() & figures.keys()):
            raise ConfigError(f"{twice[0]}: two parts have it. Join parts that measured different things")
        figures |= own
    for name in SUMMED:
        if counts := [part.figures[name] for part in parts if name in part.figures]:
            figures[name] = sum(counts)
    for name in LEAST:
        if values := [part.figures[name] for part in parts if name in part.figures]:
            figures[name] = min(values)
    argv = [*parts[0].argv, *(word for part in parts[1:] for word in (tables.THEN, *part.argv))]
    date = max(part.date for part in parts)
    return replace(parts[0], argv=argv, date=date, figures=figures | summary(figures))


def main(
    flags: argparse.ArgumentParser,
    argv: Sequence[str],
    measure: Callable[[Models, Path, argparse.Namespace], Iterator[Figures]],
    summary: Callable[[Figures], Figures],
    table: Callable[[Result], str],
) -> None:
    """A part, measured; or parts, joined."""
    flags.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="makes one result of parts' results")
    arguments = flags.parse_args(argv)
    name = flags.prog.rpartition(" ")[2]

    def join() -> Result:
        found = {path: results.read(path) for path in arguments.join}
        if others := [f"{path} is of {part.name}" for path, part in found.items() if part.name != name]:
            raise ConfigError(f"--join: {others[0]}. Name parts of {name} alone")
        made = joined(list(found.values()), summary)
        out.print(Markdown(table(made)))
        return made

    def part(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
        for figures in measure(models, logs, arguments):
            yield figures | summary(figures)

    if arguments.join:
        command.run(name, arguments, join)
    else:
        command.main(name, None, argv, part, table, flags)
