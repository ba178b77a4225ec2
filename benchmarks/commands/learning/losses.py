"""Which loss is a drafter to learn by? Equal steps, equal data, no server.

    python -m benchmarks losses --json benchmarks/results/losses.cpu2.json

The trainer's presets, each with every token loss, from random weights on rollouts of the embedded target at temperature
1; judged by the trainer's gate, on rollouts of problems that no training sees.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple, get_args

from rich.markdown import Markdown
from tokenizers import Tokenizer

from benchmarks.lib.command import SEED, out, parser_of_seeds, run
from benchmarks.lib.tables import origin, table
from benchmarks.lib.training.rollouts import runs as with_states
from tlt_server import results
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import Problem, problems, training_problems
from tlt_server.demo.training.corpus import Sequence as Rollout
from tlt_server.demo.training.model import Target
from tlt_server.demo.training.sampling import sample
from tlt_server.drafter.folder import create
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import Objective, TokenLoss
from tlt_server.trainer.learn.packing import Pack, Run, pack, within
from tlt_server.trainer.publish.folder import load_drafter, load_frozen
from tlt_server.trainer.publish.gate import accept_length
from tlt_server.trainer.start import OBJECTIVES

MEASURES = ("tlt_server/trainer/learn",)
DEPTH = 3


class Side(NamedTuple):
    """kind: of the drafter. words: for people. token_losses: that it is tried with."""

    kind: DrafterKind
    objective: Objective
    words: str
    token_losses: tuple[str, ...] = get_args(TokenLoss)


SIDES = {
    "eagle": Side(DrafterKind.EAGLE, OBJECTIVES["eagle"], "EAGLE, 1 step"),
    "hass": Side(DrafterKind.EAGLE, OBJECTIVES["hass"], "HASS, 3 steps"),
    "aligned": Side(
        DrafterKind.EAGLE, replace(OBJECTIVES["hass"], likeliest=0.0), "the same, not the likeliest", ("cross_entropy",)
    ),
    "token": Side(DrafterKind.EAGLE, replace(OBJECTIVES["eagle3"], steps=DEPTH), "EAGLE, tokens alone, 3 steps"),
    "eagle3": Side(DrafterKind.EAGLE3, OBJECTIVES["eagle3"], "EAGLE-3, 8 steps"),
}
"""What drafters learn by, but for the token loss."""
NAMES = tuple(f"{loss}_{token}" for loss, side in SIDES.items() for token in side.token_losses)


class Plan(NamedTuple):
    """rollouts: learnt from, one to a problem. judged: held-out ones. steps: of training, of `entries` each. longest:
    tokens of a rollout, prompt included."""

    rollouts: int
    judged: int
    steps: int
    entries: int
    rate: float = 2e-3
    longest: int = 640


CPU, GPU, SMOKE = Plan(512, 64, 200, 512), Plan(4096, 512, 1500, 4096), Plan(8, 4, 20, 64, longest=64)


class Data(NamedTuple):
    """Rollouts with the target's states: to learn from, and packed to judge by."""

    runs: list[Run]
    judged: list[Pack]


def data(target: Target, kind: DrafterKind, rollouts: Sequence[list[Rollout]], entries: int) -> Data:
    """Of a kind of drafter, which decides what it reads."""
    learnt, judged = (list(with_states(target, kind, each)) for each in rollouts)
    return Data(learnt, pack(judged, entries, target.lm_head.weight.device))


def both(target: Target, plan: Plan) -> tuple[list[Rollout], ...]:
    """To learn from, and to judge by."""
    asked = training_problems(plan.rollouts, SEED), problems(plan.judged, SEED)
    return tuple(rolled_out(target, each, SEED + n, plan.longest) for n, each in enumerate(asked))


def rolled_out(target: Target, asked: Sequence[Problem], seed: int, longest: int) -> list[Rollout]:
    """A response of the target to each, at temperature 1."""
    tokenizer = Tokenizer.from_file(str(default_paths()[0] / "tokenizer.json"))
    return sample(target, [each.ids for each in tokenizer.encode_batch([p.prompt for p in asked])], seed, longest)


def learnt(plan: Plan, kind: DrafterKind, objective: Objective, of: Data, seed: int) -> float:
    """Expected accept length of a drafter that began with random weights."""
    device = of.judged[0].tokens.device
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
        create(str(default_paths()[0]), Path(scratch) / "drafter", kind, seed=seed)
        network = load_drafter(Path(scratch) / "drafter").network.to(device)
    frozen = load_frozen(default_paths()[0], 0, of.runs[0].finals.dtype)
    frozen = replace(frozen, embedding=frozen.embedding.to(device), head=frozen.head.to(device))
    trainer = Trainer(network, frozen, objective, Settings(rate=plan.rate), seed)
    draw = Random(seed)  # the same packs for every loss
    for _ in range(plan.steps):
        trainer.step(pack(within(draw.sample(of.runs, len(of.runs)), plan.entries), plan.entries, device))
    return accept_length(network, frozen, of.judged, DEPTH)


def measured(plan: Plan, seeds: Sequence[int]) -> dict[str, dict[int, float]]:
    """Expected accept lengths by loss and token loss, `LOSS_TOKENLOSS`, and by seed."""
    target = load_target(default_paths()[0]).to("cuda" if has_gpu() else "cpu")
    rollouts = both(target, plan)
    of = {kind: data(target, kind, rollouts, plan.entries) for kind in DrafterKind}
    found: dict[str, dict[int, float]] = {}
    for loss, side in SIDES.items():
        for token_loss in side.token_losses:
            objective = replace(side.objective, token_loss=token_loss)
            name = f"{loss}_{token_loss}"
            found[name] = {seed: learnt(plan, side.kind, objective, of[side.kind], seed) for seed in seeds}
            out.print(f"{name}: {', '.join(f'{length:.3f}' for length in found[name].values())}")
    return found


def figures(plan: Plan, found: Mapping[str, Mapping[int, float]]) -> Figures:
    """As docs/results define them."""
    made: Figures = {name: getattr(plan, name) for name in ("rollouts", "judged", "steps", "entries")}
    made["seeds"] = len(next(iter(found.values())))
    for name, lengths in found.items():
        values = lengths.values()
        made |= {f"expected_accept_length_{name}": fmean(values)}
        made |= {f"expected_accept_length_{name}_{end}": f(values) for end, f in (("low", min), ("high", max))}
    return made


def told(found: Figures) -> str:
    """What was learnt from, and how much is judged by."""
    return (
        f"{found['seeds']} drafters each, {found['steps']:,} steps of {found['entries']:,} entries, from "
        f"{found['rollouts']:,} rollouts; judged on {found['judged']:,} others. In brackets the least and the most."
    )


def shown(result: Result) -> str:
    """Expected accept lengths by loss and token loss, as Markdown."""
    found = result.figures

    def cell(name: str) -> str:
        mean, low, high = (found[f"expected_accept_length_{name}{end}"] for end in ("", "_low", "_high"))
        return f"{mean:.2f} ({low:.2f} to {high:.2f})"

    tokens = get_args(TokenLoss)
    rows = [
        [side.words, *(cell(f"{loss}_{token}") if token in side.token_losses else "" for token in tokens)]
        for loss, side in SIDES.items()
    ]
    header = ["expected accept length", *(name.replace("_", " ") for name in tokens)]
    return "\n\n".join((origin(result), told(found), table(header, rows)))


def main(argv: Sequence[str]) -> None:
    parser = parser_of_seeds("losses", __doc__)
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        plan, seeds = (SMOKE, [0]) if arguments.smoke else (GPU if has_gpu() else CPU, arguments.seeds)
        made = figures(plan, measured(plan, seeds))
        result = results.measured_here("losses", [*parser.prog.split(), *argv], made)
        out.print(Markdown(shown(result)))
        return result

    run("losses", arguments, measure)
