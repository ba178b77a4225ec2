"""All benchmarks:  python -m benchmarks; one of them:  python -m benchmarks NAME [FLAGS]."""

import importlib
import sys
from collections.abc import Sequence
from itertools import groupby

from benchmarks.lib.project.ages import ages
from benchmarks.lib.project.catalogue import commands


def listing() -> str:
    """A line for each command, room by room; then the results that have to be measured again."""
    lines = []
    for room, found in groupby(commands().values(), key=lambda command: command.room):
        lines += [f"{room}:", *(f"  {command.name:14} {command.summary}" for command in found)]
    lines += ["", "results that are older than what they measure:"]
    lines += [f"  {name:22} {age}" for name, age in ages().items() if age]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(f"python -m benchmarks NAME [FLAGS]; --help says a benchmark's flags\n\n{listing()}\n")
    elif command := commands().get(argv[0]):
        importlib.import_module(command.module).main(argv[1:])
    else:
        sys.stderr.write(f"benchmarks: {argv[0]}: no such benchmark. python -m benchmarks lists all\n")
        raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
