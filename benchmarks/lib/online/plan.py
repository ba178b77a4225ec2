"""What all runs of a comparison have in common."""

from pathlib import Path
from typing import Any

import msgspec

from tlt_server.demo import default_paths
from tlt_server.trainer.config import TrainConfig

SETTINGS = Path(__file__).with_name("drafter_trainer.toml")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The live traffic, what is learnt from it, and what is judged by."""

    rounds: int
    """Of rollouts; the next is sampled once the drafter has learnt from all before as often as `passes` says."""
    recovery: int
    """Rounds more, of another policy."""
    prompts: int
    """Of a round."""
    group: int
    """Responses to each."""
    max_new_tokens: int = 512
    passes: float
    """How often a token is learnt from online."""
    offline_passes: float
    """Offline at most: the best drafter on the way there counts."""
    entries: int
    """Of a training step."""
    judged: int
    """Held-out problems, a response each."""


# on a CPU small steps, and many, as in the demo
CPU = Plan(rounds=8, recovery=4, prompts=8, group=4, passes=10, offline_passes=20, entries=512, judged=96)
GPU = Plan(rounds=16, recovery=8, prompts=16, group=8, passes=20, offline_passes=40, entries=4096, judged=1024)
SMOKE = Plan(
    rounds=2, recovery=1, prompts=2, group=2, max_new_tokens=64, passes=2, offline_passes=4, entries=256, judged=4
)


def settings(plan: Plan, seed: int) -> dict[str, Any]:
    """What the file of settings leaves open."""
    return {"passes": plan.passes, "entries": plan.entries, "seed": seed}


def config(plan: Plan, seed: int, folder: Path) -> TrainConfig:
    """Of a trainer, online or offline; its drafter begins as the seed draws it. folder: its own."""
    return TrainConfig.read(
        SETTINGS, settings(plan, seed) | {"folder": str(folder)}, {"target": str(default_paths()[0])}
    )
