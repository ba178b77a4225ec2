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
    online   the bandit; `tlt-server train` beside it is asked for some packs in each step, whose time is the step's
    muted    as online, but nothing is published
    plain    a server without a drafter, for a few steps: whether `off` is as fast
    again    `off` with other seeds of sampling, for a few steps: how far apart two runs are in any case

With --modes, off and frozen take other steps beside those `on_policy`: `offload` releases the server's memory while the
policy learns; `one_step_off` and `partial` roll out meanwhile, and publish between two tokens: how old tokens are then,
and what that is worth with speculation and without it.

With --apart the policy learns on a second GPU, and a drafter that is trained along meanwhile on the server's.

With --change the task changes in a run, which makes a frozen drafter stale: as in `adaptation`, a lesson begins the
change, here given to the small model, whose time is no 7B's.

Then larger batches, and other accept lengths, are replayed from what the choices' decode steps gave and took.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.lib import parts
from benchmarks.lib.command import EMBEDDED, SEED, Models, parser, positive
from benchmarks.lib.step.figures import of_run, replayed, requests, summary
from benchmarks.lib.step.plan import ARMS, MODES, MUTED, OFF, OFFLOAD, ON_POLICY, SMOKE, STATIC, Plan, changing, what
from benchmarks.lib.step.policy import Learner, learner
from benchmarks.lib.step.replay import Replay
from benchmarks.lib.step.running import Kept, Run, Runner
from benchmarks.lib.step.same import Against
from benchmarks.lib.step.serving import SIZES, kinds, serving
from benchmarks.lib.step.shown import table
from benchmarks.models.shapes import SHAPES
from tlt_server.demo.task import sample_texts
from tlt_server.errors import ConfigError
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("examples/grpo/tlt_grpo", "tlt_server/engine/decode", "tlt_server/strategy", "tlt_server/trainer")


def planned(arguments: argparse.Namespace) -> Plan:
    """By the flags."""
    plan = SMOKE if arguments.smoke else Plan()
    flags = ("steps", "prompts", "group", "learning_rate", "replayed", "modes", "packs", "judged_every", "held_out")
    given = {name: getattr(arguments, name) for name in flags}
    chosen = {name: value for name, value in given.items() if value is not None}
    plan = changing(plan) if arguments.change else plan
    return msgspec.structs.replace(plan, **chosen, checkpointing=arguments.checkpointing, apart=arguments.apart)


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, after each arm of each seed."""
    plan, figures = planned(arguments), Figures()
    if plan.apart and has_gpu() and torch.cuda.device_count() < 2:
        raise ConfigError("--apart: the policy learns on a second GPU, and there is one")
    shape = SHAPES.get(padded_to(arguments) or "")
    config = plan.config(models.target, models.workload.longest, 0)
    one = learner(config, shape, models.workload.models / "target")
    for seed in arguments.seeds:
        before = figures
        for found in _of_seed(seed, plan, models, one, logs, arguments):
            figures = _added(before, found)
            yield figures


def padded_to(arguments: argparse.Namespace) -> str | None:
    """The shape; None: the models are as they are."""
    return arguments.shape if not arguments.model_path and arguments.shape in SHAPES else None


def _of_seed(
    seed: int, plan: Plan, models: Models, one: Learner, logs: Path, arguments: argparse.Namespace
) -> Iterator[Figures]:
    largest = max((plan.prompts, *plan.replayed)) * plan.group
    sizes = [size for size in SIZES if size < largest] + [largest]
    end = f"{what(plan, models.workload.name)}_seed_{seed}"
    runner, runs, figures = Runner(plan, models, one, seed), list[Run](), Figures()
    against = Against(Kept(arguments.policies), one, sequences(one, plan), end)
    asked = arguments.arms or (arm for arm in ARMS if not (arguments.smoke and arm == MUTED))
    for group in kinds(sorted(asked, key=ARMS.index)):
        one.rest()
        lends, shape = OFFLOAD in plan.modes and OFF in group, padded_to(arguments)
        with serving(group, models, sizes, logs, smoke=arguments.smoke, seed=seed, lends=lends, shape=shape) as served:
            sweeps = OFF in group and (STATIC in group or plan.replayed)
            static, swept = runner.sweep(served) if sweeps else (None, [])
            for mode, arm in plan.runs(group, seed):
                runs.append(run := runner.run(arm, served, static, mode))
                figures |= of_run(run, plan, one, f"{what(plan, models.workload.name, mode)}_seed_{seed}")
                figures |= against.figures(run) if mode == ON_POLICY else {}
                yield figures | requests(runs)
            if swept:
                on_policy = {run.arm: run for run in runs if run.mode == ON_POLICY}
                figures |= replayed(Replay(swept, sizes, on_policy, plan.uncounted), plan, end)
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
    flags.add_argument("--arms", nargs="+", choices=ARMS, help=f"default: all; in a smoke all but {MUTED}")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    flags.add_argument("--steps", type=positive, help=f"of each arm (default: {Plan().steps})")
    flags.add_argument("--prompts", type=positive, help=f"of a step (default: {Plan().prompts})")
    flags.add_argument("--group", type=positive, help=f"responses to each (default: {Plan().group})")
    flags.add_argument("--learning-rate", type=float, help=f"default: {Plan().learning_rate}")
    flags.add_argument("--replayed", nargs="*", type=positive, help="prompts of steps to replay (default: 8 16)")
    flags.add_argument("--modes", nargs="+", choices=MODES, help=f"of off and frozen (default: {Plan().modes[0]})")
    flags.add_argument("--packs", type=positive, help=f"that a drafter learns from in a step (default: {Plan().packs})")
    flags.add_argument(
        "--judged-every", type=positive, help=f"steps a drafter is judged (default: {Plan().judged_every})"
    )
    flags.add_argument("--held-out", type=positive, help=f"problems at the end (default: {Plan().held_out})")
    flags.add_argument("--checkpointing", action="store_true", help="activations are computed again: for larger steps")
    flags.add_argument("--apart", action="store_true", help="the policy learns on a second GPU; weights go by NCCL")
    flags.add_argument(
        "--policies", type=Path, metavar="FOLDER", help="keeps what later commands' arms are compared with"
    )
    flags.add_argument("--change", action="store_true", help="the task changes; steps count once the change is taught")
    parts.main(flags, argv, measured, summary, table)
