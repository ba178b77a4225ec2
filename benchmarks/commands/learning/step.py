"""How much faster is a whole step of RL, with everything counted?

    python -m benchmarks step --seeds 0 --arms off static frozen again --policies /tmp/policies --json part0.json
    python -m benchmarks step --seeds 0 --arms online muted plain --policies /tmp/policies --json part1.json
    python -m benchmarks step --join part0.json part1.json --json benchmarks/results/step.h200.json

tlt-grpo, the server and, for some arms, a drafter trainer share one machine: roll out, grade, learn, publish, by one
clock. The policy that learns is the padded model itself (models/padded_adamw.py), all of which is published. Each arm
takes the same steps, on the same problems with the same seeds of sampling, from the first policy and drafter on:

    off      plain decoding, by the server that has the drafter and its arms
    static   the arm that drains the first step's batch soonest
    frozen   the bandit, the drafter as it is
    online   the bandit, `tlt-server train` beside it; what it costs is in the step
    muted    as online, but nothing is published
    plain    a server without a drafter, for a few steps: whether `off` is as fast
    again    `off` with other seeds of sampling, for a few steps: how far apart two runs are in any case

With --change the task changes in a run, which makes a frozen drafter stale: as in `adaptation`, a lesson begins the
change, here given to the small model, whose time is no 7B's.

Then larger batches, and other accept lengths, are replayed from what the choices' decode steps gave and took.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.lib import parts
from benchmarks.lib.command import EMBEDDED, SEED, Models, parser, positive
from benchmarks.lib.step.figures import compared, of_run, replayed, requests, summary
from benchmarks.lib.step.plan import ARMS, OFF, SMOKE, Plan, changing, rotated, what
from benchmarks.lib.step.policy import Learner, learner
from benchmarks.lib.step.replay import Replay
from benchmarks.lib.step.running import Kept, Run, Runner
from benchmarks.lib.step.serving import SIZES, kinds, serving
from benchmarks.lib.step.shown import table
from benchmarks.models.shapes import SHAPES
from tlt_server.demo.task import sample_texts
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("examples/grpo/tlt_grpo", "tlt_server/engine/decode", "tlt_server/strategy", "tlt_server/trainer")


def planned(arguments: argparse.Namespace) -> Plan:
    """By the flags."""
    plan = SMOKE if arguments.smoke else Plan()
    given = {name: getattr(arguments, name) for name in ("steps", "prompts", "group", "learning_rate", "replayed")}
    chosen = {name: value for name, value in given.items() if value is not None}
    plan = changing(plan) if arguments.change else plan
    return msgspec.structs.replace(plan, **chosen, checkpointing=arguments.checkpointing)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, after each arm of each seed."""
    plan, figures = planned(arguments), Figures()
    shape = None if arguments.model_path else SHAPES.get(arguments.shape)
    config = plan.config(models.target, models.workload.longest, 0)
    one = learner(config, shape, models.workload.models / "target")
    for seed in arguments.seeds:
        before = figures
        for found in _of_seed(seed, plan, models, one, logs, arguments):
            figures = _added(before, found)
            yield figures


def _of_seed(
    seed: int, plan: Plan, models: Models, one: Learner, logs: Path, arguments: argparse.Namespace
) -> Iterator[Figures]:
    largest = max((plan.prompts, *plan.replayed)) * plan.group
    sizes = [size for size in SIZES if size < largest] + [largest]
    end = f"{what(plan, models.workload.name)}_seed_{seed}"
    runner, runs, figures, kept = Runner(plan, models, one, seed), dict[str, Run](), Figures(), Kept(arguments.policies)
    for group in kinds([arm for arm in ARMS if arm in arguments.arms]):
        one.rest()
        with serving(group, models, sizes, logs, smoke=arguments.smoke, seed=seed) as served:
            static, swept = runner.sweep(served) if OFF in group else (None, [])
            for arm in rotated(group, seed):
                runs[arm] = runner.run(arm, served, static)
                figures |= of_run(runs[arm], plan, one, end)
                yield figures | requests(runs)
            if swept:
                figures |= replayed(Replay(swept, sizes, runs, plan.uncounted), plan, end)
    for run in runs.values():
        kept.add(run, end)
    if off := kept.find(OFF, end) or (runs[OFF].compared if OFF in runs else None):
        arms = {arm: run.compared for arm, run in runs.items() if arm != OFF}
        figures |= compared(arms, off, one, sequences(one, plan), end)
    yield figures | requests(runs)


def _added(before: Figures, figures: Figures) -> Figures:
    """Of one seed more."""
    sums = {name: before.get(name, 0) + figures[name] for name in parts.SUMMED}
    return before | figures | sums


def sequences(one: Learner, plan: Plan) -> list[tuple[int, ...]]:
    """That policies are compared on: worked solutions that nobody learns from."""
    return [one.tokens(text) for text in sample_texts(plan.compared, SEED)]


def main(argv: Sequence[str]) -> None:
    flags = parser("step", __doc__, compares=False)
    flags.set_defaults(shape="qwen2.5-7b" if has_gpu() else EMBEDDED)
    flags.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="default: all")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    flags.add_argument("--steps", type=positive, help=f"of each arm (default: {Plan().steps})")
    flags.add_argument("--prompts", type=positive, help=f"of a step (default: {Plan().prompts})")
    flags.add_argument("--group", type=positive, help=f"responses to each (default: {Plan().group})")
    flags.add_argument("--learning-rate", type=float, help=f"default: {Plan().learning_rate}")
    flags.add_argument("--replayed", nargs="*", type=positive, help="prompts of steps to replay (default: 8 16)")
    flags.add_argument("--checkpointing", action="store_true", help="activations are computed again: for larger steps")
    flags.add_argument(
        "--policies", type=Path, metavar="FOLDER", help="keeps what later commands' arms are compared with"
    )
    flags.add_argument("--change", action="store_true", help="the task changes; steps count once the change is taught")
    parts.main(flags, argv, measured, summary, table)
