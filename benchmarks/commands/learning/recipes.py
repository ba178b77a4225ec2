"""Does our trainer learn as much from as many tokens as SpecForge's recipe, and as its own code? Equal data, no server.

    pip install --no-deps --target /tmp/specforge specforge==0.2.0
    python -m benchmarks recipes --specforge /tmp/specforge --json benchmarks/results/recipes.cpu2.json

EAGLE-3 drafters of the embedded target, each from the same random weights and the target's head, learn from the same
runs in the same order: by our trainer with its defaults; in our trainer by SpecForge's recipe, its loss, schedule and
rate, and by all of that at our rate; and by SpecForge's own code, at both rates, whose head learns, too. Judged by the
trainer's gate, on rollouts of problems that no training sees.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec
import torch
from rich.markdown import Markdown

from benchmarks.commands.learning import losses
from benchmarks.commands.learning.losses import Data, Plan, both, data
from benchmarks.lib.command import out, parser_of_seeds, run
from benchmarks.lib.tables import origin, table
from benchmarks.lib.training import recipe, specforge
from tlt_server import results
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.demo.checkpoint import load_target
from tlt_server.drafter.folder import create
from tlt_server.results import Figures, Result
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import EAGLE3, Objective
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Run, pack, within
from tlt_server.trainer.publish.folder import load_drafter, load_frozen
from tlt_server.trainer.publish.gate import accept_length

MEASURES = ("tlt_server/trainer/learn",)
CPU = torch.device("cpu")
DEPTH = 3
OURS = Settings().rate
SIDES = {
    "ours": "ours, as it comes",
    "recipe": "ours, by SpecForge's recipe",
    "recipe_fast": "the same at our rate",
    "code": "SpecForge's own code",
    "code_fast": "the same at our rate",
}


CPU_PLAN, SMOKE = Plan(512, 64, 300, 512, OURS), Plan(8, 4, 4, 64, OURS, longest=64)


def by_ours(drafter: Path, of: Data, plan: Plan, seed: int) -> Network:
    """The drafter in `drafter`, after training as it comes: the average of its weights, as a rate that stays needs."""
    trainer = Trainer(load_drafter(drafter).network, _frozen(), EAGLE3, Settings(rate=plan.rate), seed)
    for runs in drawn(of, plan, seed):
        trainer.step(pack(runs, plan.entries, CPU))
    return trainer.average


def by_recipe(drafter: Path, of: Data, plan: Plan, seed: int, highest: float) -> Network:
    """SpecForge's loss and schedule in our trainer."""
    settings = Settings(warmup=1, decay=0.0, betas=recipe.BETAS, clip=recipe.CLIP)
    objective = Objective(steps=recipe.STEPS, decay=recipe.DECAY)
    trainer = Trainer(load_drafter(drafter).network, _frozen(), objective, settings, seed)
    for step, runs in enumerate(drawn(of, plan, seed)):
        trainer.settings = msgspec.structs.replace(settings, rate=recipe.rate(step, plan.steps, highest))
        trainer.step(pack(runs, plan.entries, CPU))
    return trainer.network


def by_code(site: Path, drafter: Path, of: Data, plan: Plan, seed: int, highest: float) -> Network:
    """SpecForge's own code; its head is the drafter's then."""
    trainer = specforge.SpecForge(site, drafter, _frozen(), highest, plan.steps)
    for runs in drawn(of, plan, seed):
        trainer.step(runs)
    trainer.save(drafter.with_name("theirs"))
    return load_drafter(drafter.with_name("theirs")).network


def drawn(of: Data, plan: Plan, seed: int) -> list[list[Run]]:
    """Of each step, the same for every side."""
    draw = Random(seed)
    return [within(draw.sample(of.runs, len(of.runs)), plan.entries) for _ in range(plan.steps)]


def _frozen() -> Frozen:
    return load_frozen(default_paths()[0], 0, torch.float32)


def measured(plan: Plan, seeds: Sequence[int], site: Path | None) -> dict[str, dict[int, float]]:
    """Expected accept lengths by side and seed; without `site`, of ours alone."""
    target = load_target(default_paths()[0])
    of = data(target, DrafterKind.EAGLE3, both(target, plan), plan.entries)
    learners: dict[str, Callable[[Path, int], Network]] = {
        "ours": lambda drafter, seed: by_ours(drafter, of, plan, seed),
        "recipe": lambda drafter, seed: by_recipe(drafter, of, plan, seed, recipe.RATE),
        "recipe_fast": lambda drafter, seed: by_recipe(drafter, of, plan, seed, plan.rate),
    }
    if site:
        learners["code"] = lambda drafter, seed: by_code(site, drafter, of, plan, seed, recipe.RATE)
        learners["code_fast"] = lambda drafter, seed: by_code(site, drafter, of, plan, seed, plan.rate)
    found: dict[str, dict[int, float]] = {name: {} for name in learners}
    for seed in seeds:
        for name, learn in learners.items():
            with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
                create(str(default_paths()[0]), Path(scratch) / "drafter", DrafterKind.EAGLE3, seed=seed)
                network = learn(Path(scratch) / "drafter", seed)
            found[name][seed] = accept_length(network, _frozen(), of.judged, DEPTH)
            out.print(f"{name}, seed {seed}: {found[name][seed]:.3f}")
    return found


def figures(plan: Plan, found: Mapping[str, Mapping[int, float]]) -> Figures:
    """As docs/results define them."""
    made = losses.figures(plan, found) | {"rate_ours": plan.rate, "rate_specforge": recipe.RATE}
    for name, lengths in found.items():
        if name != "ours":
            made[f"ours_over_{name}_min"] = min(found["ours"][seed] / value for seed, value in lengths.items())
    return made


def shown(result: Result) -> str:
    """Expected accept lengths by side, as Markdown."""
    found = result.figures
    rows = []
    for name, words in SIDES.items():
        if (start := f"expected_accept_length_{name}") in found:
            mean, low, high = (found[f"{start}{end}"] for end in ("", "_low", "_high"))
            rate = found["rate_specforge" if name in ("recipe", "code") else "rate_ours"]
            least = f"{found[f'ours_over_{name}_min']:.3f}" if name != "ours" else ""
            rows.append([words, f"{rate:g}", f"{mean:.3f} ({low:.3f} to {high:.3f})", least])
    heads = ["trainer", "highest rate", "expected accept length", "ours over it, least"]
    return "\n\n".join((origin(result), losses.told(found), table(heads, rows)))


def main(argv: Sequence[str]) -> None:
    parser = parser_of_seeds("recipes", __doc__)
    parser.add_argument("--specforge", type=Path, metavar="FOLDER", help="where its code lies (default: without it)")
    arguments = parser.parse_args(argv)
    run("recipes", arguments, lambda: _result(arguments, [*parser.prog.split(), *argv]))


def _result(arguments: argparse.Namespace, command: list[str]) -> Result:
    if arguments.specforge:
        specforge.check(arguments.specforge)
    plan, seeds = (SMOKE, [0]) if arguments.smoke else (CPU_PLAN, arguments.seeds)
    made = figures(plan, measured(plan, seeds, arguments.specforge))
    result = results.measured_here("recipes", command, made)
    out.print(Markdown(shown(result)))
    return result
