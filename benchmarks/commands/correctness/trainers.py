"""Which RL trainers take whole steps against a server here, by the tests behind clients/TRAINERS.md?

    python -m benchmarks trainers --json trainers.json

A trainer works that the table says so of, and whose tests all pass. Tests tell of `steps` of RL, and of
`stale_rollouts`: samples that other weights made than the step's own.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from rich.markdown import Markdown

from benchmarks.lib.command import out, run
from benchmarks.lib.project.ages import TOP
from benchmarks.lib.tables import table
from tlt_server import results
from tlt_server.errors import ServerFailed
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/api", "tlt_server/engine/transfer", "tlt_server/engine/weights", "clients")
TABLE = TOP / "clients/TRAINERS.md"
NAMED = re.compile(r"`((?:tests|clients|examples)/[\w/.]+\.py(?:::\w+)?)`")
RAN = (0, 1)
"""pytest's exit codes of a run to the end."""


class Row(NamedTuple):
    """Of the table: a trainer, what is said of it, and the tests that show it."""

    trainer: str
    state: str
    tests: tuple[str, ...]


class Ran(NamedTuple):
    """What became of the tests of one place, a file or a function in it, and what they told."""

    passed: int
    failed: int
    told: Counter[str]


def rows(text: str) -> list[Row]:
    """The table's, below its rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [
        Row(trainer, state, tuple(NAMED.findall(line)))
        for line, (trainer, _, state, *_) in zip(lines[2:], cells, strict=True)
    ]


def ran(report: Path, test: str) -> Ran:
    """What a JUnit report says of a test's cases."""
    file, _, function = test.partition("::")
    module, passed, failed = file.removesuffix(".py").replace("/", "."), 0, 0
    told: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        if case.get("classname") != module or function not in ("", name) or case.find("skipped") is not None:
            continue
        fine = case.find("failure") is None and case.find("error") is None
        passed, failed = passed + fine, failed + (not fine)
        for each in case.iter("property"):
            told[each.get("name", "")] += int(each.get("value", "0"))
    return Ran(passed, failed, told)


def judged(found: Sequence[Row], report: Path) -> tuple[Figures, list[list[str]]]:
    """The figures, and a line for each trainer."""
    by_test = {test: ran(report, test) for row in found for test in row.tests}
    lines, working = [], 0
    for row in found:
        of_row = [by_test[test] for test in row.tests]
        fine = bool(of_row) and all(each.passed and not each.failed for each in of_row)
        working += fine and row.state.startswith("yes")
        counts = f"{sum(each.passed for each in of_row)} passed, {sum(each.failed for each in of_row)} failed"
        lines.append([row.trainer, re.split(r"\W", row.state)[0], counts if of_row else "no test"])
    told = sum((each.told for each in by_test.values()), Counter())
    failed = sum(each.failed or not each.passed for each in by_test.values())
    figures = {"trainers": len(found), "trainers_working": working, "steps_failed": failed}
    return figures | {"stale_rollouts": 0} | dict(told), lines


def measure(argv: Sequence[str]) -> Result:
    found = rows(TABLE.read_text())
    tests = list(dict.fromkeys(test for row in found for test in row.tests))
    with tempfile.TemporaryDirectory(prefix="tlt-trainers-") as scratch:
        report = Path(scratch, "report.xml")
        properties = ["-o", "junit_family=xunit1"]  # the later one has none of a test's own
        command = [sys.executable, "-m", "pytest", "-v", *tests, *properties, f"--junitxml={report}"]
        code = subprocess.run(command, cwd=TOP, check=False).returncode
        if code not in RAN:
            raise ServerFailed(f"pytest ended with {code}: {' '.join(command)}")
        figures, lines = judged(found, report)
    result = results.measured_here("trainers", ["python", "-m", "benchmarks", "trainers", *argv], figures)
    out.print(Markdown(table(["trainer", "said", "tests"], lines)))
    out.print(figures)
    return result


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trainers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    run("trainers", parser.parse_args(argv), lambda: measure(argv))
