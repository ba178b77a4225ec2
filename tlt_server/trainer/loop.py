"""Training itself: packs in, better weights out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from tlt_server.errors import ConfigError
from tlt_server.trainer.chains import Frozen, autocast
from tlt_server.trainer.losses import Objective, loss
from tlt_server.trainer.network import Network
from tlt_server.trainer.packing import Pack

WEIGHTS = "weights."
"""Before the name of each of a drafter's tensors, in what `Trainer.state` returns."""

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What torch's AdamW keeps of each weight; the last on the CPU."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of AdamW (arXiv 1711.05101), for a drafter that never stops learning: the rate rises and then stays.

    rate: of learning. warmup: steps until it is reached. decay: of matrices alone. clip: of the gradient's norm.
    """

    rate: Annotated[float, Meta(gt=0)] = 1e-3
    warmup: Annotated[int, Meta(ge=1)] = 50
    decay: Annotated[float, Meta(ge=0)] = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: Annotated[float, Meta(gt=0)] = 1.0


@dataclass(frozen=True)
class Metrics:
    """Of one step. gradient_norm: before it is clipped. chains: that were drafted. skipped: the gradient is not finite,
    nothing changed."""

    step: int
    loss: float
    gradient_norm: float
    chains: int
    skipped: bool


class Trainer:
    """A drafter, its optimiser and all that decides what comes next; on the device that the network is on.

    Weights and moments are float32. steps, tokens: of training until now; a token counts each time it is learnt from.

    Args:
        network: trained in place.
        frozen: of the target; whoever follows the target sets it anew, between two steps.
        seed: of the draws; `random` is for whoever draws the packs, so that a resumed trainer draws as it would have.
    """

    def __init__(
        self, network: Network, frozen: Frozen, objective: Objective, settings: Settings | None = None, seed: int = 0
    ) -> None:
        self.network, self.frozen, self.objective = network, frozen, objective
        self.settings = settings or Settings()
        self.random, self.steps, self.tokens = Random(seed), 0, 0
        self._named = dict(network.named_parameters())
        self._device = next(iter(self._named.values())).device
        matrices = [weight for weight in self._named.values() if weight.dim() > 1]
        others = [weight for weight in self._named.values() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": self.settings.decay}, {"params": others, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, lr=self.settings.rate, betas=self.settings.betas)

    def step(self, packs: Iterable[Pack]) -> Metrics:
        """One step over all entries of `packs`, each pack's loss weighted by its share of the chains."""
        chosen = [(pack, int(pack.counted.sum())) for pack in packs]
        chains = sum(count for _, count in chosen)
        total = torch.zeros((), device=self._device)
        self._optimiser.zero_grad()
        for pack, count in chosen:
            with autocast(self._device):
                value = loss(self.network, self.frozen, pack, self.objective) * (count / max(chains, 1))
            value.backward()
            total += value.detach()
        norm = nn.utils.clip_grad_norm_(self._named.values(), self.settings.clip).item()
        finite = norm < float("inf")
        if finite:
            rate = self.settings.rate * min((self.steps + 1) / self.settings.warmup, 1.0)
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            self._optimiser.step()
        self.steps, self.tokens = self.steps + 1, self.tokens + chains
        return Metrics(self.steps, total.item(), norm, chains, skipped=not finite)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a resumed trainer needs: tensors, not copied, and facts that JSON can hold."""
        tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in self.network.state_dict().items()}
        for name, weight in self._named.items():
            tensors |= {f"{moment}.{name}": value for moment, value in self._optimiser.state[weight].items()}
        tensors["random"] = torch.get_rng_state()
        return tensors, {"steps": self.steps, "tokens": self.tokens, "random": self.random.getstate()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Goes on where the trainer stood whose `state` this is.

        Raises:
            ConfigError: it is of another drafter.
        """
        for name, weight in self._named.items():
            if (saved := tensors.get(f"{WEIGHTS}{name}")) is None or saved.shape != weight.shape:
                raise ConfigError(f"checkpoint: its {name} is not this drafter's. Name another folder for checkpoints")
        for name, weight in self._named.items():
            weight.data.copy_(tensors[f"{WEIGHTS}{name}"])
            moments = {m: tensors[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in tensors}
            self._optimiser.state[weight] = {
                moment: value.to("cpu" if moment == "step" else weight.device, copy=True)
                for moment, value in moments.items()
            }
        torch.set_rng_state(tensors["random"].cpu())
        version, state, gauss = facts["random"]
        self.random.setstate((version, tuple(state), gauss))
        self.steps, self.tokens = facts["steps"], facts["tokens"]
