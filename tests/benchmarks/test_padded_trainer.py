"""What a padded drafter learns in the trainer is what the small drafter in it learns by itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.lib.step.padded_trainer import PaddedTrainer
from benchmarks.models.padding import Padding
from benchmarks.models.shapes import Shape, build
from tests.trainer import models
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import HASS
from tlt_server.trainer.learn.packing import Pack, Run, pack
from tlt_server.trainer.publish.folder import load_drafter, load_frozen

SMALL = models.target().shape
LARGE = Shape(
    bias=True, vocab=SMALL.vocab + 64, hidden=SMALL.hidden + 64, layers=SMALL.layers, heads=2 * SMALL.heads,
    kv_heads=SMALL.kv_heads, head_dim=SMALL.head_dim, mlp=SMALL.mlp + 64,
)  # fmt: skip
UPDATES = 12
SETTINGS = Settings(warmup=1, decay=0.0)


def beside(states: Tensor, spare: Tensor) -> Tensor:
    return torch.cat((states.float(), spare.expand(len(states), -1)), -1)


def packs_of(runs: list[Run]) -> list[Pack]:
    return pack(runs, 512, torch.device("cpu"))


@pytest.mark.slow
def test_the_small_drafter_learns_in_the_padded_one(tmp_path: Path) -> None:
    small, alone = models.embedded("eagle"), models.embedded("eagle")
    built = build(LARGE, tmp_path / "padded", dtype=torch.float32, device="cpu", names=("target", "drafter"))
    large, frozen = load_drafter(built.drafter).network, load_frozen(built.target, 0)
    runs, spare = models.texts("eagle", 3), frozen.embedding[0, SMALL.hidden :]
    # a padded target's normalised states hold another multiple of the spare
    wide = [replace(run, states=beside(run.states, 30 * spare), finals=beside(run.finals, 30 * spare)) for run in runs]
    trainer = Trainer(alone, models.frozen(), HASS, SETTINGS)
    padding = Padding(SMALL, LARGE, torch.float32, "cpu", 0)
    imitator = PaddedTrainer(small, padding, large, frozen, HASS, SETTINGS)
    for _ in range(UPDATES):
        trainer.step(packs_of(runs))
        imitator.step(packs_of(wide))
    assert imitator.padded.changed() == []
    for one, other, before in zip(
        *(each.parameters() for each in (alone, small, models.embedded("eagle"))), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)
        assert (one - before).abs().max() > 20 * (one - other).abs().max()
