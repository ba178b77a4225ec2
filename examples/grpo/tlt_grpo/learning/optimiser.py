"""AdamW for weights of any dtype: gradients are added up, bounded and applied in float32."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

LONGEST_GRADIENT = 1.0


class Optimiser(Protocol):
    """What a policy asks of one: `gather` after each backward pass, `step` after the last."""

    norm: float
    """Of the last step's gradient, before that was bounded by LONGEST_GRADIENT."""

    def gather(self) -> None:
        """Adds the weights' gradients up, and lets them go."""
        ...

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Masters:
    """Float32 copies of weights. An update of a rate of 1e-5 is lost in bfloat16, which has 8 bits; here it is not.

    Weights that are float32 are their own copies.
    """

    def __init__(self, weights: Iterable[Parameter]) -> None:
        self._weights = list(weights)
        self.all = [each if each.dtype == torch.float32 else Parameter(each.detach().float()) for each in self._weights]

    def gather(self) -> None:
        for weight, master in zip(self._weights, self.all, strict=True):
            if weight is not master and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Writes the weights anew."""
        for weight, master in zip(self._weights, self.all, strict=True):
            if weight is not master:
                weight.copy_(master)

    @torch.no_grad()
    def load(self, values: Iterable[Tensor]) -> None:
        for master, value in zip(self.all, values, strict=True):
            master.copy_(value)
        self.spread()


class MasterAdamW:
    """One step of AdamW on the masters, their gradient bounded by LONGEST_GRADIENT.

    No weight decay: it pulls at weights of which no reward has said anything.
    """

    def __init__(self, masters: Masters, rate: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self._masters, self.norm = masters, 0.0
        self._adam = torch.optim.AdamW(masters.all, rate, betas, weight_decay=0.0)

    def gather(self) -> None:
        self._masters.gather()

    def step(self) -> None:
        self.norm = torch.nn.utils.clip_grad_norm_(self._masters.all, LONGEST_GRADIENT).item()
        self._adam.step()
        self._adam.zero_grad()
        self._masters.spread()

    def state_dict(self) -> dict[str, Any]:
        """Of masters and moments: all that a run goes on from."""
        return {"masters": [each.detach() for each in self._masters.all], "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._masters.load(state["masters"])
        self._adam.load_state_dict(state["adam"])
