"""`tlt-server train` of a drafter that was padded to a larger shape: the small drafter in it learns, at the large cost.

    python -m benchmarks.lib.step.padded_trainer SHAPE MODELS train --tlt-config FILE ...

SHAPE: of models/shapes.py. MODELS: folder with the small target and drafter. All else is the trainer's own.

A plain AdamW would train the padding, too: in the dimensions that hold the spare (models/padding.py) the target's
states, which are normalised, are not what the drafter's own are, and after a few updates its chains have no bounds.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from benchmarks.models.padded_adamw import PaddedAdamW
from benchmarks.models.padding import Padding
from benchmarks.models.shapes import SHAPES
from tlt_server import cli
from tlt_server.demo.checkpoint import load_target
from tlt_server.errors import ServerFailed
from tlt_server.trainer import start
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.loop import Metrics, Settings, Trainer
from tlt_server.trainer.learn.losses import Objective
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack
from tlt_server.trainer.publish.folder import load_drafter

CHECKED_EVERY = 20
"""Steps, from one look at the padding to the next."""


class PaddedTrainer(Trainer):
    """small: drafter in float32 whose padded form `network` is, on the same device. A state's loss is a mean over its
    dimensions, of which the padding's say nothing: it weighs as much more as there are more of them."""

    def __init__(
        self,
        small: Network,
        padding: Padding,
        network: Network,
        frozen: Frozen,
        objective: Objective,
        settings: Settings | None = None,
        seed: int = 0,
    ) -> None:
        settings = settings or Settings()
        scaled = replace(objective, state=objective.state * padding.large.hidden / padding.small.hidden)
        # the small drafter's gradient is bounded, by PaddedAdamW
        super().__init__(network, frozen, scaled, msgspec.structs.replace(settings, clip=math.inf), seed)
        self.padded = PaddedAdamW(network, small.to(self.device), padding, settings.rate, settings.betas)
        self._optimiser = self.padded

    def step(self, packs: Sequence[Pack]) -> Metrics:
        """Raises ServerFailed: the padding has changed."""
        metrics = super().step(packs)
        if self.steps % CHECKED_EVERY == 0 and (changed := self.padded.changed()):
            raise ServerFailed(f"the padding of {changed[0]} has changed: what is learnt is not the small drafter's")
        return metrics


def main(shape: str, models: Path, arguments: Sequence[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    padding = Padding(load_target(models / "target").shape, SHAPES[shape], torch.float32, device, 0)
    start.Trainer = partial(PaddedTrainer, load_drafter(models / "drafter").network, padding)  # type: ignore[misc]
    sys.argv = ["tlt-server", *arguments]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
