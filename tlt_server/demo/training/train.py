"""Make the embedded default again: `python -m tlt_server.demo.training.train --device cuda --out DIR`.

First the target learns to write worked solutions, then it is sampled, then its drafters learn from those samples what
it says next. Last, everything is read back as stored and judged on problems that were kept out of training.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tlt_server.demo.checkpoint import load_drafter, load_target, save_drafter, save_target
from tlt_server.demo.task import sample_texts, training_problems
from tlt_server.demo.tokens import build_tokenizer, save_tokenizer
from tlt_server.demo.training.corpus import Batch, Sequence, batches, worked_solutions
from tlt_server.demo.training.drafter import Drafter, Eagle3Drafter, EagleDrafter, draft_chains
from tlt_server.demo.training.evaluate import STEPS, evaluate
from tlt_server.demo.training.model import Shape, Target
from tlt_server.demo.training.optimise import optimise
from tlt_server.demo.training.sampling import sample
from tlt_server.results import measured_here, write

SEED = 1
MAX_ROLLOUT = 1100
# weight of the distance to the target's next hidden state in EAGLE's loss
STATE_WEIGHT = 0.1

DRAFTERS: dict[str, type[EagleDrafter | Eagle3Drafter]] = {"drafter": EagleDrafter, "drafter_eagle3": Eagle3Drafter}


def main() -> None:
    """Train and judge; prints the figures and leaves them with the checkpoints under --out."""
    args = _parse()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(SEED)
    device, seconds = torch.device(args.device), dict[str, float]()
    clock = _Clock(seconds)
    tokenizer = build_tokenizer(sample_texts(20_000, SEED))
    solutions = worked_solutions(args.solutions, SEED, tokenizer, args.processes)
    clock.lap("solutions")
    shape = Shape(vocab=tokenizer.get_vocab_size(), hidden=args.hidden, mlp=3 * args.hidden)
    target = _train_target(shape, solutions, args, device)
    save_target(target, args.out / "target")
    save_tokenizer(tokenizer, args.out / "target", shape.context)
    target = load_target(args.out / "target").to(device)
    clock.lap("target")
    rollouts = _roll_out(target, tokenizer, args.rollouts)
    clock.lap("rollouts")
    drafters: dict[str, Drafter] = {}
    for name, kind in DRAFTERS.items():
        steps = args.drafter_steps if kind is EagleDrafter else args.eagle3_steps
        drafter = _train_drafter(kind(shape).to(device), name, target, rollouts, steps, args)
        save_drafter(drafter, shape, args.out / name)
        drafters[name] = load_drafter(args.out / name).to(device)
        clock.lap(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    figures = evaluate(target, drafters, tokenizer, args.eval_rollouts)
    clock.lap("evaluation")
    _report(args.out, figures | {f"seconds_{stage}": taken for stage, taken in seconds.items()})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
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
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.last = seconds, time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self.last = round(now - self.last, 1), now
        print(f"{name}: {self.seconds[name]} s", flush=True)  # noqa: T201


def _train_target(shape: Shape, solutions: list[Sequence], args: argparse.Namespace, device: torch.device) -> Target:
    target = Target(shape)
    target.to(device)

    def loss(batch: Batch) -> Tensor:
        rope = shape.rope(torch.arange(batch.tokens.shape[1], device=device))
        hidden, _ = target(batch.tokens, rope)
        said = batch.is_response[:, 1:]
        return F.cross_entropy(target.lm_head(hidden[:, :-1][said]).float(), batch.tokens[:, 1:][said])

    data = batches(solutions, args.batch_tokens, SEED, device)
    optimise("target", target, loss, data, args.target_steps, peak_rate=2e-3)
    return target


def _roll_out(target: Target, tokenizer: Tokenizer, count: int) -> list[Sequence]:
    drawn = training_problems(count, SEED + 1)
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([problem.prompt for problem in drawn])]
    return sample(target, prompts, SEED, MAX_ROLLOUT)


def _train_drafter(
    drafter: Drafter, name: str, target: Target, rollouts: list[Sequence], steps: int, args: argparse.Namespace
) -> Drafter:
    target.requires_grad_(False)
    device = target.lm_head.weight.device

    def loss(batch: Batch) -> Tensor:
        return drafter_loss(target, drafter, batch)

    data = batches(rollouts, args.batch_tokens // 2, SEED, device)
    optimise(name, drafter, loss, data, steps, peak_rate=2e-3)
    return drafter


def drafter_loss(target: Target, drafter: Drafter, batch: Batch) -> Tensor:
    """Cross-entropy to the target's distribution, over all steps of the chains that start at each response token.

    EAGLE's states are also drawn to the hidden states which they stand in for.
    """
    rope = target.shape.rope(torch.arange(batch.tokens.shape[1], device=batch.tokens.device))
    with torch.no_grad(), torch.autocast(batch.tokens.device.type, enabled=False):
        hidden, outputs = target(batch.tokens, rope)
        # index i of a chain predicts token i + 2, whose distribution the target gives at token i + 1
        drafted = batch.is_response[:, 1:-1] & batch.is_response[:, 2:]
        wanted, truth = target.lm_head(hidden[:, 1:-1][drafted]).softmax(-1), hidden[:, 1:-1][drafted]
    features = drafter.features(hidden, outputs)
    total = wanted.new_zeros(())
    for head in draft_chains(target, drafter, batch.tokens, features, STEPS):
        said = head[:, :-1][drafted]
        total = total + F.cross_entropy(target.lm_head(said).float(), wanted)
        if isinstance(drafter, EagleDrafter):
            total = total + STATE_WEIGHT * F.smooth_l1_loss(said.float(), truth)
    return total / STEPS


def _report(out: Path, figures: dict[str, float]) -> None:
    sizes = {f"bytes_{path.parent.name}": path.stat().st_size for path in out.glob("*/model.safetensors")}
    rounded = {name: round(value, 4) for name, value in figures.items()}
    write(measured_here("demo_training", sys.argv, rounded | sizes), out / "figures.json")
    print((out / "figures.json").read_text())  # noqa: T201


if __name__ == "__main__":
    main()
