"""Training itself: packs in, better weights out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.chains import Frozen, autocast
from tlt_server.trainer.learn.losses import Objective, loss
from tlt_server.trainer.learn.memory import move, moved
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack
from tlt_server.trainer.learn.team import Team

WEIGHTS, AVERAGE = "weights.", "average."
"""Before the name of each of a drafter's tensors, and of each averaged, in what `Trainer.state` returns."""

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What torch's AdamW keeps of each weight."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of AdamW (arXiv 1711.05101), for a drafter that never stops learning: the rate rises and then stays.

    rate: of learning. warmup: steps until it is reached. decay: of matrices alone. clip: of the gradient's norm.
    average: share of the weights' average that a step leaves; 0.95 averages over the last 20 steps or so.
    """

    rate: Annotated[float, Meta(gt=0)] = 1e-3
    warmup: Annotated[int, Meta(ge=1)] = 50
    decay: Annotated[float, Meta(ge=0)] = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: Annotated[float, Meta(gt=0)] = 1.0
    average: Annotated[float, Meta(ge=0, lt=1)] = 0.95


@dataclass(frozen=True)
class Metrics:
    """Of one step. gradient_norm: before it is clipped. chains: that were drafted. skipped: why nothing changed, where
    the gradient is not finite."""

    step: int
    loss: float
    gradient_norm: float
    chains: int
    skipped: str


def _unlearnable(norm: float, value: float, frozen: Frozen, packs: Sequence[Pack]) -> Iterator[str]:
    """Says of a gradient that is not finite what else is not: the target's embedding or head, or its states, of which
    requests at which positions. value: of the loss."""
    yield f"the gradient is not finite: norm {norm}, loss {value}"
    for name, tensor in (("embedding", frozen.embedding), ("head", frozen.head)):
        if rows := int((~tensor.sum(-1).isfinite()).sum()):
            yield f"nor are {rows} rows of target {frozen.version}'s {name}"
    for pack in packs:
        bad = ~(pack.states.isfinite().all(-1) & pack.finals.isfinite().all(-1))
        for (start, stop), request in zip(pack.bounds, pack.requests, strict=False):  # a filler has no request
            if at := pack.positions[start:stop][bad[start:stop]].tolist():
                yield f"nor are the states of {len(at)} entries of request {request}, from position {at[0]}"


def learn(network: Network, frozen: Frozen, objective: Objective, packs: Sequence[Pack], chains: int) -> Tensor:
    """Adds the gradients of `packs` to those of the weights; gives the loss, a scalar in float32. Each pack counts by
    its share of `chains`, those of the whole training step."""
    device = next(network.parameters()).device
    total = torch.zeros((), device=device)
    for pack in packs:
        with autocast(device):
            share = pack.counted.sum() / max(chains, 1)
            value = loss(network, frozen, pack, objective) * share
        value.backward()
        total += value.detach()
    return total


class Trainer:
    """A drafter, its optimiser and all that decides what comes next; on the network's device, in float32.

    network: trained in place. frozen: of the target; set anew between two steps, on `device`, when the target moves.
    random: for whoever draws the packs, so that a resumed trainer draws as it would have. steps, tokens: of training
    until now; a token counts each time it is learnt from. team: who else takes part in a step; nobody by default.
    """

    def __init__(
        self, network: Network, frozen: Frozen, objective: Objective, settings: Settings | None = None, seed: int = 0
    ) -> None:
        self.network, self.frozen, self.objective = network, frozen, objective
        self.settings, self.team = settings or Settings(), Team()
        self.random, self.steps, self.tokens = Random(seed), 0, 0
        self._named = dict(network.named_parameters())
        self._average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(self.settings.average))
        matrices = [weight for weight in self._named.values() if weight.dim() > 1]
        others = [weight for weight in self._named.values() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": self.settings.decay}, {"params": others, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, lr=self.settings.rate, betas=self.settings.betas, fused=True)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return next(iter(self._named.values())).device

    @property
    def average(self) -> Network:
        """Moving average of the weights (Polyak and Juditsky, 1992). At a rate that never falls each step overshoots,
        the average less so; where the target has just moved it lags. Which drafts better is the gate's to find."""
        module: Network = self._average.module
        return module

    def move(self, device: torch.device) -> None:
        """To another device; nothing of it stays on the one before."""
        if device == self.device:
            return
        move(self.network, device)
        move(self._average, device)
        for moments in self._optimiser.state.values():
            moments |= {name: moved(moments[name], device) for name in MOMENTS if name in moments}
        embedding, head = (moved(each, device) for each in (self.frozen.embedding, self.frozen.head))
        self.frozen = Frozen(embedding, head, self.frozen.version)

    def step(self, packs: Sequence[Pack]) -> Metrics:
        """One step over all entries of `packs`, by all who are present in the team. Raises RankLost: one of them is
        gone."""
        total, chains = self.gradients(packs)
        norm = nn.utils.clip_grad_norm_(self._named.values(), self.settings.clip).item()
        finite = norm < float("inf")
        if finite:
            rate = self.settings.rate * min((self.steps + 1) / self.settings.warmup, 1.0)
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            self._optimiser.step()
            self._average.update_parameters(self.network)
        self.steps, self.tokens = self.steps + 1, self.tokens + chains
        value = total.item()
        skipped = "" if finite else ", ".join(_unlearnable(norm, value, self.frozen, packs))
        return Metrics(self.steps, value, norm, chains, skipped)

    def gradients(self, packs: Sequence[Pack]) -> tuple[Tensor, int]:
        """Those of all `packs`, wherever they were computed; the loss, and how many chains there were."""
        chains = sum(int(pack.counted.sum()) for pack in packs)
        self._optimiser.zero_grad()
        mine = self.team.share(packs, chains, self.network, self.frozen)
        total = learn(self.network, self.frozen, self.objective, mine, chains)
        return total + self.team.gather(self.network), chains

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a resumed trainer needs: tensors, not copied, and facts that JSON can hold."""
        tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in self.network.state_dict().items()}
        tensors |= {f"{AVERAGE}{name}": tensor for name, tensor in self.average.state_dict().items()}
        for name, weight in self._named.items():
            tensors |= {f"{moment}.{name}": value for moment, value in self._optimiser.state[weight].items()}
        tensors["random"] = torch.get_rng_state()
        return tensors, {"steps": self.steps, "tokens": self.tokens, "random": self.random.getstate()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Goes on where the trainer stood whose `state` this is. Raises ConfigError: it is of another drafter."""
        for name, weight in self._named.items():
            for kind in (WEIGHTS, AVERAGE):
                if (saved := tensors.get(f"{kind}{name}")) is None or saved.shape != weight.shape:
                    raise ConfigError(
                        f"checkpoint: its {kind}{name} is not this drafter's. Name another folder for checkpoints"
                    )
        for name, weight in self._named.items():
            weight.data.copy_(tensors[f"{WEIGHTS}{name}"])
            self.average.get_parameter(name).data.copy_(tensors[f"{AVERAGE}{name}"])
            moments = {m: tensors[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in tensors}
            self._optimiser.state[weight] = {m: value.to(weight.device, copy=True) for m, value in moments.items()}
        self._average.n_averaged.fill_(1)  # at 0 the next step would begin another average
        torch.set_rng_state(tensors["random"].cpu())
        version, state, gauss = facts["random"]
        self.random.setstate((version, tuple(state), gauss))
        self.steps, self.tokens = facts["steps"], facts["tokens"]
