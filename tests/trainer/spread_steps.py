"""`torchrun ... -m tests.trainer.spread_steps FOLDER DEVICE`: steps of processes, in some of which one is away.

What is learnt is left in the folder. On GPUs, where no test runs:

    python -m tests.trainer.spread_steps /tmp/one cuda
    torchrun --standalone --nproc-per-node 2 -m tests.trainer.spread_steps /tmp/two cuda
    python -m tests.trainer.spread_steps /tmp/one /tmp/two      # how far they are from one another
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.trainer.models import config, embedded, frozen, texts
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.helper import assist
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import HASS, Objective
from tlt_server.trainer.learn.packing import Pack, pack
from tlt_server.trainer.learn.ranks import joined
from tlt_server.trainer.learn.team import Team

CPU = torch.device("cpu")
BUDGET, STEPS = 192, 5
OBJECTIVES = {"eagle": HASS, "eagle3": Objective(steps=2, decay=0.8)}
WITHOUT = {1: 1, 3: 1}
"""Steps before which a rank gives its device back, to be away in that step alone."""


def batch(kind: str, step: int, device: torch.device) -> list[Pack]:
    """Packs of several sizes."""
    return pack(texts(kind, 24)[4 * step : 4 * step + 4], BUDGET, device)


def target(step: int, device: torch.device) -> Frozen:
    """Another one from the third step on."""
    embedding, head = (each.to(device) for each in (frozen().embedding, frozen().head))
    return Frozen(embedding, head if step < 2 else head * 1.01, version=step // 2)


def trainer(kind: str, device: torch.device = CPU, team: Team | None = None) -> Trainer:
    network = embedded(kind).to(device)
    made = Trainer(network, target(0, device), OBJECTIVES[kind], Settings(rate=1e-3, warmup=2))
    made.team = team or made.team
    return made


def train(training: Trainer, kind: str) -> list[float]:
    """The loss of each step."""
    team, losses = training.team, []
    everybody = team.present
    for step in range(STEPS):
        training.frozen = target(step, training.device)
        if (away := WITHOUT.get(step)) in everybody[1:]:
            team.free(away)
        team.present = [rank for rank in everybody if rank != away]
        losses.append(training.step(batch(kind, step, training.device)).loss)
    return losses


def furthest(one: Path, other: Path, kind: str) -> float:
    """The largest difference between what two runs have learnt of a weight, over the furthest that it has moved."""
    first, second = (load_file(folder / f"{kind}.safetensors") for folder in (one, other))
    start = embedded(kind).state_dict()
    floats = [name for name, each in start.items() if each.is_floating_point()]
    return max(float((first[n] - second[n]).abs().max() / (first[n] - start[n]).abs().max()) for n in floats)


def main(folder: Path, device: str) -> None:
    folder.mkdir(exist_ok=True)
    with joined(device) as place:
        for kind, objective in OBJECTIVES.items():
            if place.rank:
                assist(place.lines[0], lambda _, it=objective: it)
            else:
                training = trainer(kind, place.device, Team(place.lines, config(kind)))
                losses = train(training, kind)
                training.team.end()
                weights = {name: each.cpu() for name, each in training.network.state_dict().items()}
                save_file(weights | {"losses": torch.tensor(losses)}, folder / f"{kind}.safetensors")


if __name__ == "__main__":
    if Path(sys.argv[2]).is_dir():
        for each in OBJECTIVES:
            sys.stdout.write(f"{each}: {furthest(Path(sys.argv[1]), Path(sys.argv[2]), each):.3g}\n")
    else:
        main(Path(sys.argv[1]), sys.argv[2])
