"""Does a drafter that learns from live traffic get as good as one that had all of it from the start?

    python -m benchmarks online --out FOLDER --json benchmarks/results/online.h200.json

For each seed: a server whose drafter has learnt nothing serves rollouts of the embedded task, round after round, while
`tlt-server train` learns from its hidden states and pushes what is better. Then a second drafter, which begins with the
same random weights, learns from the same tokens, all of them there from the start, until it gets no better. The same
server judges both on the same held-out problems. Before that another policy is published: how soon does the drafter
follow?

A seed that is over is kept in FOLDER, and is not run again: several commands may run a seed each, and another report.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markdown import Markdown

from benchmarks.lib import tables
from benchmarks.lib.command import out, parser_of_seeds, run
from benchmarks.lib.online import shown
from benchmarks.lib.online.figures import Run, figures
from benchmarks.lib.online.live import Counts, Live, Sampled, accept_length, serving
from benchmarks.lib.online.offline import learn
from benchmarks.lib.online.plan import CPU, GPU, SMOKE, Plan, config
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.errors import ConfigError
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/trainer", "tlt_server/engine/features")


class Kept(msgspec.Struct, frozen=True):
    """A seed's run, and what it was a run of. made: where and how, a result without figures: who reports may be another
    machine."""

    plan: Plan
    run: Run
    made: Result


def runs(folder: Path, plan: Plan, seeds: Sequence[int], argv: list[str]) -> dict[int, Kept]:
    """Of these seeds, by seed; what is not there yet is run.

    Args:
        argv: the command that runs them.

    Raises:
        ConfigError: `folder` holds a run of another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for seed in seeds:
        file = folder / f"seed-{seed}.json"
        if not file.exists():
            origin = results.measured_here("online", argv, {})
            with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:  # the path of a socket may not be long
                made = Kept(plan, one(plan, seed, Path(scratch)), origin)
            partial = file.with_suffix(".partial")
            partial.write_bytes(msgspec.json.encode(made))
            partial.replace(file)
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
        if kept.plan != plan:
            raise ConfigError(f"{file}: a run of another plan. Name another folder by --out")
        found[seed] = kept
    return found


def report(found: Mapping[int, Kept]) -> Result:
    """The figures of these runs, by seed; by the command and at the date of the newest.

    Raises:
        ConfigError: they were made on several machines, or by several revisions.
    """
    made = [kept.made for kept in found.values()]
    tables.require_one_origin(made)
    of = {seed: kept.run for seed, kept in found.items()}
    return msgspec.structs.replace(max(made, key=lambda each: each.date), figures=figures(of))


def one(plan: Plan, seed: int, folder: Path) -> Run:
    """A seed's run. folder: for logs, drafters and sockets."""
    with serving(seed, f"ipc://{folder}/live", folder) as live:
        sampled, rounds, changed, said = online(live, plan, seed)
        settings = config(plan, seed, folder / "offline")
        best = learn(settings, sampled, plan.offline_passes * said["tokens_received"], folder / "best")
        out.print(f"seed {seed}, offline: {best.steps} of {best.of} steps, expected {best.expected:.3f}")
        judged = {}
        for arm, drafter in (("online", live.drafter), ("offline", best.folder), ("embedded", default_paths()[1])):
            live.activate(drafter)
            judged[arm] = live.judge(plan)
    out.print(f"seed {seed}: " + ", ".join(f"{arm} {accept_length(counts):.3f}" for arm, counts in judged.items()))
    counted = {
        "rounds": plan.rounds,
        "responses": len(sampled),
        "tokens": sum(len(each.rollout.tokens) for each in sampled),
        "judged_responses": plan.judged,
        "passes_offline": plan.offline_passes,
        "steps_offline": best.steps,
        "learnt_offline": best.entries,
    }
    return Run(judged, rounds, changed, counted | said)


def online(live: Live, plan: Plan, seed: int) -> tuple[list[Sampled], list[float], list[tuple[float, int]], Figures]:
    """Live traffic until the policy changes; accept lengths of each round; those of rounds after that, and training
    steps taken before each; and what is to be told of the trainer."""
    sampled: list[Sampled] = []
    rounds: list[float] = []
    changed: list[tuple[float, int]] = []
    said: dict[str, Any] = {}
    steps = 0
    began = time.monotonic()
    for number, (some, status) in enumerate(live.traffic(plan, seed)):
        length = accept_length([Counts.of(each.rollout) for each in some])
        if number < plan.rounds:
            sampled += some
            rounds.append(length)
            said = status
        else:
            changed.append((length, steps - said["steps"]))
        steps = status["steps"]
        out.print(
            f"seed {seed}, round {number + 1}: accept length {length:.3f}; {status['tokens_received']} tokens "
            f"received, step {steps}, drafter {status['active']}; {time.monotonic() - began:.0f} s"
        )
    told: Figures = {
        "tokens_received": said["tokens_received"],
        "passes_online": plan.passes,
        "steps_online": said["steps"],
        "learnt_online": plan.passes * said["tokens_received"],
        "drafters_online": said["published"],
    }
    return sampled, rounds, changed, told


def main(argv: Sequence[str]) -> None:
    parser = parser_of_seeds("online", __doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="keeps the runs")
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        plan, seeds = (SMOKE, [0]) if arguments.smoke else (GPU if has_gpu() else CPU, arguments.seeds)
        result = report(runs(arguments.out, plan, seeds, [*parser.prog.split(), *argv]))
        out.print(Markdown(shown.online(result)))
        return result

    run("online", arguments, measure)
