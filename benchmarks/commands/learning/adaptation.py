"""Does a drafter that is trained along follow a policy that changes under RL?

    python -m benchmarks adaptation --out FOLDER --json benchmarks/results/adaptation.h200.json

Four arms, each seed a run of its own with the same problems: speculation off; the embedded drafter, frozen; the same
one adapting, by a trainer that follows the server; and as a control one that had as many more training steps, on
rollouts of the first policy alone. In the middle of each run the task changes.

A run that is over is kept in FOLDER, and is not run again: one command may do a part, and the next go on. The figures
are of all that FOLDER holds.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.markdown import Markdown
from tlt_grpo.log import Line, Log, read

from benchmarks.lib import tables
from benchmarks.lib.adaptation import arms, shown
from benchmarks.lib.adaptation.control import ROLLOUTS, STEPS, control, converged
from benchmarks.lib.adaptation.figures import ARMS, Run, Runs, figures
from benchmarks.lib.adaptation.rl import Plan
from benchmarks.lib.adaptation.rl import run as reinforce
from benchmarks.lib.command import out, parser_of_seeds, positive, run
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/trainer", "tlt_server/engine/features", "tlt_server/engine/weights")
SMOKE = Plan(
    steps=2, switch=1, lesson_steps=1, updates=1, solutions=4, prompts=2, group=2, max_new_tokens=96, held_out=4,
    control_rollouts=8,
)  # fmt: skip
CONVERGED = "converged.json"
LOG = "log.jsonl"
MADE = "made.json"
"""Of a run: where and how it was made, a result without figures. Who reports may be another machine."""


class Place:
    """A folder of runs, all of one plan.

    argv: the command, of those that are run here.

    Raises:
        ConfigError: there are runs of another plan in it.
    """

    def __init__(self, folder: Path, plan: Plan, argv: Sequence[str] = ()) -> None:
        self.folder, self.plan, self.argv = folder, plan, list(argv)
        folder.mkdir(parents=True, exist_ok=True)
        kept, made = folder / "plan.json", msgspec.json.format(msgspec.json.encode(plan))
        if kept.exists() and kept.read_bytes() != made:
            raise ConfigError(f"--out {folder}: holds runs of another plan, {kept}. Name another folder")
        partial = folder / f".plan-{os.getpid()}.partial"  # several commands may begin at once
        partial.write_bytes(made)
        partial.replace(kept)

    def of(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}"

    def found(self, arm: str, seed: int) -> Run | None:
        """A run that is over, and has left all that it leaves."""
        left = [LOG, MADE, arms.TRAINER_JSON] if arm == "adapting" else [LOG, MADE]
        folder = self.of(arm, seed)
        return Run.of(read(folder / LOG)) if all((folder / name).exists() for name in left) else None

    def runs(self) -> dict[str, Runs]:
        """All that are over, by arm and seed."""
        there = [log.parent.name.rpartition("-") for log in self.folder.glob(f"*/{LOG}")]
        found: dict[str, dict[int, Run]] = {}
        for arm, _, seed in sorted(there, key=lambda each: (ARMS.index(each[0]), int(each[2]))):
            if (one := self.found(arm, int(seed))) is not None:
                found.setdefault(arm, {})[int(seed)] = one
        return dict(found)

    def run(self, arm: str, seed: int) -> None:
        """One run; of one that was broken off nothing is kept, and of one that is over logs alone."""
        folder = self.of(arm, seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        made = self._made_here({})
        with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
            drafter = self._drafter(arm, seed, Path(scratch))
            with arms.serving(arm, seed, drafter, folder) as url, Log(folder / LOG) as log:

                def tell(line: Line) -> None:
                    log.write(line)
                    out.print(f"{arm}, seed {seed}, {line}")

                reinforce(self.plan, url, Path(scratch), seed, tell)
        results.write(made, folder / MADE)

    def _made_here(self, figures: Figures) -> Result:
        return results.measured_here("adaptation", self.argv, figures)

    def _drafter(self, arm: str, seed: int, scratch: Path) -> Path:
        """That the server begins with."""
        if arm != "control":
            return default_paths()[1]
        if self.found("adapting", seed) is None:
            raise ConfigError(f"control, seed {seed}: learns as long as the adapting drafter; run that one first")
        steps = arms.trained(self.of("adapting", seed))["steps"]
        made = scratch / "drafter"
        control(made, steps, seed, self.plan.control_rollouts, self.plan.max_new_tokens)
        return made

    def converge(self, *, smoke: bool) -> None:
        """Is the embedded drafter converged? Asked once."""
        kept = self.folder / CONVERGED
        if not kept.exists():
            found = converged(2, 8, 8) if smoke else converged(STEPS, ROLLOUTS, 4096)
            results.write(self._made_here(found), kept)

    def report(self) -> Result:
        """The figures of all that is here; by the command and at the date of its newest part.

        Raises:
            ConfigError: no run is over; or they were made on several machines, or by several revisions.
        """
        if not (runs := self.runs()):
            raise ConfigError(f"--out {self.folder}: holds no run that is over. Leave --report out")
        made = [results.read(self.of(arm, seed) / MADE) for arm, of_arm in runs.items() for seed in of_arm]
        found = figures(runs, self.plan.switch)
        if adapting := [arms.trained(self.of("adapting", seed)) for seed in runs.get("adapting", {})]:
            found["training_steps"] = sum(each["steps"] for each in adapting) / len(adapting)
        if (kept := self.folder / CONVERGED).exists():
            made.append(results.read(kept))
            found |= made[-1].figures
        tables.require_one_origin(made)
        return msgspec.structs.replace(max(made, key=lambda each: each.date), figures=found)


def measured(place: Place, wanted: Iterable[str], seeds: Sequence[int]) -> None:
    """Runs what is not there yet: the seeds one after another, so that what is broken off holds whole comparisons."""
    for seed in seeds:
        for arm in sorted(wanted, key=ARMS.index):
            if place.found(arm, seed) is None:
                place.run(arm, seed)


def main(argv: Sequence[str]) -> None:
    parser = parser_of_seeds("adaptation", __doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="keeps the runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="default: all")
    parser.add_argument("--steps", type=positive, default=Plan().steps, help="of RL (default: %(default)s)")
    parser.add_argument("--switch", type=positive, default=Plan().switch, help="of them, before the task changes")
    parser.add_argument("--converge", action="store_true", help="also asks whether the frozen drafter is converged")
    parser.add_argument("--report", action="store_true", help="no runs")
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        plan = msgspec.structs.replace(Plan(), steps=arguments.steps, switch=arguments.switch)
        place = Place(arguments.out, SMOKE if arguments.smoke else plan, [*parser.prog.split(), *argv])
        if not arguments.report:
            measured(place, arguments.arms, arguments.seeds[:1] if arguments.smoke else arguments.seeds)
        if arguments.converge:
            place.converge(smoke=arguments.smoke)
        result = place.report()
        out.print(Markdown(shown.adaptation(result)))
        return result

    run("adaptation", arguments, measure)
