"""Drafters that learn from the rollouts of the first policy alone, without any server.

1. the control: as many training steps as the adapting drafter had, by the same trainer and settings
2. is the embedded drafter converged? The recipe that made it, once more as long, and both judged
"""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.lib.adaptation.arms import trainer_config
from benchmarks.lib.training.rollouts import runs, state_dtype
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import problems, training_problems
from tlt_server.demo.training.corpus import Sequence, batches
from tlt_server.demo.training.evaluate import accepted_drafts, judge
from tlt_server.demo.training.model import Target
from tlt_server.demo.training.optimise import optimise
from tlt_server.demo.training.sampling import sample
from tlt_server.demo.training.train import drafter_loss
from tlt_server.launch import has_gpu
from tlt_server.results import Figures
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.losses import HASS
from tlt_server.trainer.learn.packing import pack, within
from tlt_server.trainer.publish import folder as drafters

STEPS, RATE, BATCH_TOKENS, ROLLOUTS = 3000, 2e-3, 32_768, 60_000
"""The recipe of the embedded drafter, as tlt_server/demo/README.md has it."""


def control(out: Path, steps: int, seed: int, rollouts: int, max_new_tokens: int) -> None:
    """Writes a drafter to `out` that has begun as the embedded one and had so many steps more.

    Args:
        rollouts: of the embedded target, to as many training problems.
    """
    device, config = _device(), trainer_config(seed)
    target = load_target(default_paths()[0]).to(device)
    learnt_from = list(runs(target, DrafterKind.EAGLE, _rollouts(target, rollouts, seed, max_new_tokens)))
    drafter = drafters.load_drafter(default_paths()[1])
    frozen = drafters.load_frozen(default_paths()[0], 0, state_dtype())
    frozen = replace(frozen, embedding=frozen.embedding.to(device), head=frozen.head.to(device))
    trainer = Trainer(drafter.network.to(device), frozen, HASS, config.optimizer, seed)
    drawn = iter(lambda: trainer.random.choice(learnt_from), None)
    for _ in range(steps):
        trainer.step(pack(within(drawn, config.entries), config.entries, device))
    replace(drafter, network=trainer.average).export(out, {"target": str(default_paths()[0]), "steps": str(steps)})


def converged(more: int, rollouts: int, judged: int) -> Figures:
    """Accept lengths at the start of the embedded drafter and of one that has learnt `more` steps longer.

    Args:
        rollouts: to learn from. judged: held-out ones to judge by, of up to 1,024 tokens.
    """
    device = _device()
    target = load_target(default_paths()[0]).to(device).requires_grad_(False)
    first, longer = (drafters.load_drafter(default_paths()[1]).network.to(device) for _ in range(2))
    data = batches(_rollouts(target, rollouts, 1, 1024), BATCH_TOKENS, 1)
    optimise("longer", longer, lambda batch: drafter_loss(target, longer, batch, BATCH_TOKENS), data, more, RATE)
    prompts = [problem.prompt for problem in problems(judged, 1)]
    held_out = sample(target, _encoded(prompts), 1, 1024)
    found = {}
    for name, drafter in (("frozen", first), ("longer", longer)):
        rows = judge(target, drafter, held_out)
        found[f"accept_length_{name}_start"] = sum(len(row.top1) for row in rows) / float(accepted_drafts(rows)[0])
    return {"longer_steps": more, "judged_rollouts": judged, **found}


def _rollouts(target: Target, count: int, seed: int, max_new_tokens: int) -> list[Sequence]:
    prompts = _encoded([problem.prompt for problem in training_problems(count, seed)])
    longest = max(map(len, prompts))
    return sample(target, prompts, seed, longest + max_new_tokens)


def _encoded(prompts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(default_paths()[0] / "tokenizer.json"))
    return [each.ids for each in tokenizer.encode_batch(prompts)]


def _device() -> torch.device:
    return torch.device("cuda" if has_gpu() else "cpu")
