"""Which share of tlt_server's lines do the tests run? Servers, schedulers and trainers that they start are counted.

    python -m tests.line_coverage --json coverage.json
    python -m tests.line_coverage --tree PATH --figure coverage_before --json before.json [-- tests/wire]

The tests are the tree's own, by the environment of its `make env`, which is made if it is not there. Ends as pytest
does; the figure is kept unless pytest was interrupted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
RUN = """
[run]
source = {source}
data_file = {folder}/data
parallel = true
patch = subprocess, fork, _exit
plugins = saving
disable_warnings = no-data-collected, module-not-imported, module-not-measured, already-imported
"""
FINISHED = (0, 1)
"""pytest's exit codes of a run to the end: all passed; some failed."""


def measure(tree: Path, tests: list[str]) -> tuple[float, int]:
    """Per cent of the lines of tree/tlt_server, and pytest's exit code.

    Raises:
        SystemExit: pytest was interrupted, or had nothing to run.
        subprocess.CalledProcessError: the tree's environment could not be made, or coverage found no data.
    """
    python = _environment(tree)
    with tempfile.TemporaryDirectory(prefix="line-coverage-") as folder:
        settings = Path(folder, "settings")
        settings.write_text(RUN.format(source=tree / "tlt_server", folder=folder))

        def coverage(*words: str) -> list[str]:
            return [str(python), "-m", "coverage", words[0], f"--rcfile={settings}", *words[1:]]

        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        started = environment | {"COVERAGE_PROCESS_START": str(settings)}  # as in what it starts: see saving.py
        run = [str(python), "-m", "pytest", *(tests or ["-n", "2", "--no-loadscope-reorder"])]
        code = subprocess.run(run, cwd=tree, env=started, check=False).returncode
        if code not in FINISHED:
            raise SystemExit(code)
        report = Path(folder, "report.json")
        for command in (coverage("combine", "--quiet"), coverage("json", "--quiet", "-o", str(report))):
            subprocess.run(command, cwd=tree, env=environment, check=True)
        return json.loads(report.read_text())["totals"]["percent_covered"], code


def _environment(tree: Path) -> Path:
    """The tree's Python, with the coverage of this environment in it: an older tree's locks have none."""
    subprocess.run(["make", "--quiet", "-C", str(tree), "env"], check=True)
    python = tree / ".venv/bin/python"
    if subprocess.run([python, "-c", "import coverage"], stderr=subprocess.DEVNULL, check=False).returncode:
        wanted = f"coverage=={version('coverage')}"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wanted], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="a checkout; this one")
    parser.add_argument("--figure", default="coverage", help="the name that the figure has in the JSON")
    parser.add_argument("--json", type=Path, help="where it is kept")
    parser.add_argument("tests", nargs="*", help="what pytest is given; all tests, by two workers")
    arguments = parser.parse_args()
    percent, code = measure(arguments.tree.resolve(), arguments.tests)
    figures = {arguments.figure: round(percent, 2)}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
