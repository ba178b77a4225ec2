"""Make the embedded default again: `python -m tlt_server.demo.training.train --device cuda --out DIR`.

First the target learns to write worked solutions, then it is sampled, then its drafters learn from those samples what
it says next. Last, everything is read back as stored and judged on problems that were kept out of training.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tlt_server.config import DrafterKind
from tlt_server.demo.checkpoint import ENDS, load_target, save_target
from tlt_server.demo.task import DEMO, LONG, Task, sample_texts, training_problems
from tlt_server.demo.tokens import build_tokenizer, save_tokenizer
from tlt_server.demo.training.corpus import Sequence, batches, collate, contexts, worked_solutions
from tlt_server.demo.training.evaluate import STEPS, evaluate
from tlt_server.demo.training.model import Shape, Target
from tlt_server.demo.training.optimise import optimise
from tlt_server.demo.training.sampling import sample, with_states
from tlt_server.drafter.folder import create
from tlt_server.results import measured_here, write
from tlt_server.trainer.learn import losses
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.losses import Objective
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import pack
from tlt_server.trainer.publish.folder import load_drafter

SEED = 1
STATE_WEIGHT = 0.1  # of the distance to the target's next hidden state in EAGLE's loss


@dataclass(frozen=True)
class Recipe:
    """What the models are for.

    context, rope_theta: of the target. longest: tokens of a rollout. filled: lengths of sequences that are filled with
    solved problems, and how often each is learned from; none: each problem stands alone.
    """

    task: Task
    context: int
    rope_theta: float
    longest: int
    filled: Mapping[int, int] = field(default_factory=dict)

    def batches(self, sequences: list[Sequence], tokens: int) -> Iterator[list[Sequence]]:
        return contexts(sequences, self.filled, tokens, SEED) if self.filled else batches(sequences, tokens, SEED)


RECIPES = {
    "demo": Recipe(DEMO, context=2048, rope_theta=1e4, longest=1100),
    "long": Recipe(LONG, context=32_768, rope_theta=1e6, longest=16_384, filled={2048: 2, 8192: 1, 32_768: 1}),
}
DRAFTERS = {"drafter": DrafterKind.EAGLE, "drafter_eagle3": DrafterKind.EAGLE3}


def main() -> None:
    """Train and judge; prints the figures and leaves them with the checkpoints under --out."""
    args = _parse()
    recipe = RECIPES[args.task]
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(SEED)
    device, clock = torch.device(args.device), _Clock()
    tokenizer = build_tokenizer(sample_texts(20_000, SEED))
    if not (args.out / "target").exists():
        solutions = worked_solutions(args.solutions, SEED, tokenizer, args.processes, recipe.task)
        clock.lap("solutions")
        trained = _train_target(recipe, tokenizer, solutions, args, device)
        save_target(trained, args.out / "target")
        save_tokenizer(tokenizer, args.out / "target", recipe.context)
        clock.lap("target")
    target = load_target(args.out / "target").to(device).requires_grad_(False)
    rollouts = _roll_out(target, recipe, tokenizer, args.rollouts)
    clock.lap("rollouts")
    drafters: dict[str, Network] = {}
    for name in DRAFTERS:
        drafters[name] = _train_drafter(name, target, recipe, rollouts, args)
        clock.lap(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    figures = evaluate(target, drafters, tokenizer, args.eval_rollouts, recipe.task, recipe.longest)
    clock.lap("evaluation")
    _report(args.out, figures | {f"seconds_{stage}": taken for stage, taken in clock.seconds.items()})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="a target that is there already is taken as it is")
    parser.add_argument("--task", choices=RECIPES, default="demo", help="long: the workload of benchmarks")
    parser.add_argument(
        "--hidden", type=int, default=256, help="a multiple of 64; the models are 3 times as wide inside"
    )
    parser.add_argument("--solutions", type=int, default=600_000, help="worked solutions that the target learns from")
    parser.add_argument("--rollouts", type=int, default=60_000, help="samples that the drafters learn from")
    parser.add_argument("--eval-rollouts", type=int, default=4096)
    parser.add_argument("--target-steps", type=int, default=5000)
    parser.add_argument("--drafter-steps", type=int, default=3000)
    parser.add_argument("--eagle3-steps", type=int, default=1500)
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="of the target; drafters take half")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser.parse_args()


class _Clock:
    def __init__(self) -> None:
        self.seconds, self.last = dict[str, float](), time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self.last = round(now - self.last, 1), now
        print(f"{name}: {self.seconds[name]} s", flush=True)  # noqa: T201


def _train_target(
    recipe: Recipe, tokenizer: Tokenizer, solutions: list[Sequence], args: argparse.Namespace, device: torch.device
) -> Target:
    shape = Shape(
        vocab=tokenizer.get_vocab_size(),
        hidden=args.hidden,
        mlp=3 * args.hidden,
        context=recipe.context,
        rope_theta=recipe.rope_theta,
    )
    target = Target(shape)
    target.to(device)

    def loss(sequences: list[Sequence]) -> Tensor:
        batch = collate(sequences, device)
        hidden, _ = target(batch.tokens, shape.rope(torch.arange(batch.tokens.shape[1], device=device)))
        said = batch.is_response[:, 1:]
        return F.cross_entropy(target.lm_head(hidden[:, :-1][said]).float(), batch.tokens[:, 1:][said])

    optimise("target", target, loss, recipe.batches(solutions, args.batch_tokens), args.target_steps, peak_rate=2e-3)
    return target


def _roll_out(target: Target, recipe: Recipe, tokenizer: Tokenizer, count: int) -> list[Sequence]:
    drawn = training_problems(count, SEED + 1, recipe.task)
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([problem.prompt for problem in drawn])]
    return sample(target, prompts, SEED, recipe.longest, rows=count)


def _train_drafter(
    name: str, target: Target, recipe: Recipe, rollouts: list[Sequence], args: argparse.Namespace
) -> Network:
    kind, budget = DRAFTERS[name], args.batch_tokens // 2
    with TemporaryDirectory() as scratch:
        create(str(args.out / "target"), Path(scratch) / name, kind, seed=SEED)
        drafter = load_drafter(Path(scratch) / name)
    network = drafter.network.to(target.lm_head.weight.device)
    steps = args.drafter_steps if kind is DrafterKind.EAGLE else args.eagle3_steps

    def loss(batch: list[Sequence]) -> Tensor:
        return drafter_loss(target, network, batch, budget)

    optimise(name, network, loss, recipe.batches(rollouts, budget), steps, peak_rate=2e-3)
    replace(drafter, config={**drafter.config, **ENDS}).export(args.out / name, {"target": "demo", "steps": str(steps)})
    stored = load_drafter(args.out / name).network
    stored.to(target.lm_head.weight.device)
    return stored


def drafter_loss(target: Target, network: Network, rollouts: list[Sequence], budget: int) -> Tensor:
    """Of rollouts of at most `budget` tokens in all; an EAGLE drafter's states are drawn to the target's as well."""
    frozen = Frozen(target.model.embed_tokens.weight, target.lm_head.weight)
    (packed,) = pack(with_states(target, network.aux_layers, rollouts), budget, frozen.head.device)
    return losses.loss(network, frozen, packed, Objective(STEPS, state=0.0 if network.aux_layers else STATE_WEIGHT))


def _report(out: Path, figures: dict[str, float]) -> None:
    sizes = {f"bytes_{path.parent.name}": path.stat().st_size for path in out.glob("*/model.safetensors")}
    rounded = {name: round(value, 4) for name, value in figures.items()}
    command = ["python", "-m", "tlt_server.demo.training.train", *sys.argv[1:]]
    write(measured_here("demo_training", command, rounded | sizes), out / "figures.json")
    print((out / "figures.json").read_text())  # noqa: T201


if __name__ == "__main__":
    main()
