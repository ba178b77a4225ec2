"""AdamW for a padded model: it learns exactly what the small model inside it would learn by itself.

A padded weight is P(w) + constant, where P puts each entry of the small model's weight w into one place, times a scale
(padding.py). AdamW on all of the padded weights would destroy that in one update: the random heads and units get
gradients, and what they write is nothing no more. So the gradient is pulled back to the small model, which is stepped
in float32, and P of it is written into the padded one:

    dL/dw = P^T dL/dW        w' = AdamW(w, dL/dw)        W' = P(w') + constant

AdamW also passes over all of the padded model's weights and moments, by gradients of zero, which moves nothing: so that
a step takes the time that one takes at that size.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tlt_grpo.learning.optimiser import LONGEST_GRADIENT
from torch import Tensor, nn

from benchmarks.models.padding import Padding, real_layers

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Block(NamedTuple):
    """Where a small weight lies in a padded one: at all `rows` and `columns` of it, times `scale`."""

    name: str
    """Of the padded weight."""
    rows: Tensor
    columns: Tensor | None
    """None for a weight of one dimension."""
    scale: float

    def of(self, weight: Tensor) -> Tensor:
        part = weight.index_select(0, self.rows)
        return part if self.columns is None else part.index_select(1, self.columns)

    def put(self, weight: Tensor, value: Tensor) -> None:
        if self.columns is None:
            weight.index_copy_(0, self.rows, value.to(weight.dtype))
        else:
            weight[self.rows[:, None], self.columns] = value.to(weight.dtype)


def blocks(small: Mapping[str, Tensor], padding: Padding, device: torch.device) -> dict[str, Block]:
    """By the small weight's name. Found by padding ones, and zeros, with the same random numbers around them."""
    real = real_layers(padding.small.layers, padding.large.layers)
    found = {}
    for name, weight in small.items():
        zeros = torch.zeros(weight.shape, dtype=weight.dtype, device=device)
        around = _placed(name, zeros, padding)
        scales = _placed(name, zeros + 1, padding) - around
        there = scales != 0
        rows = (there if there.dim() == 1 else there.any(1)).nonzero()[:, 0]
        columns = None if there.dim() == 1 else there.any(0).nonzero()[:, 0]
        block = Block(_name(name, real), rows, columns, scales.max().item())
        _check(name, block, zeros, around, padding)
        found[name] = block
    return found


def _placed(name: str, weight: Tensor, padding: Padding) -> Tensor:
    again = Padding(padding.small, padding.large, weight.dtype, str(weight.device), 0)
    [(_, placed)] = again.drafter({name: weight})
    return placed


def _name(name: str, real: list[int]) -> str:
    if ".layers." not in name:
        return name
    begin, _, rest = name.partition(".layers.")
    layer, _, end = rest.partition(".")
    return f"{begin}.layers.{real[int(layer)]}.{end}"


def _check(name: str, block: Block, zeros: Tensor, around: Tensor, padding: Padding) -> None:
    """Raises ValueError: the entries do not lie in their own order, each with the same scale."""
    # of float32 whole numbers up to 2^24 alone are exact: the entries' places are tried as small numbers in turn
    tried = (torch.arange(zeros.numel(), device=zeros.device) % 8191 + 1).to(zeros.dtype).view_as(zeros)
    placed = _placed(name, tried, padding) - around
    if not torch.allclose(block.of(placed), tried * block.scale, rtol=1e-5, atol=0):
        raise ValueError(f"{name}: the padding does not place it as one block; PaddedAdamW needs another map for it")


class PaddedAdamW(torch.optim.Optimizer):
    """Of the padded model's weights, as any trainer takes an optimiser. A trainer's own bound of the gradient's norm is
    to be off: the small model's gradient is bounded here.

    Args:
        padded: with the weights that `padding` made of the small model's, in any dtype.
        small: float32 or float64, with the same names; it is the master copy that is stepped.

    Self-checks: `cosine`, `norm` and `changed`.
    """

    def __init__(
        self,
        padded: nn.Module,
        small: nn.Module,
        padding: Padding,
        rate: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        super().__init__(padded.parameters(), {"lr": rate})
        self._large, self._small = dict(padded.named_parameters()), dict(small.named_parameters())
        device = next(iter(self._large.values())).device
        self._blocks = blocks(self._small, padding, device)
        fast = {"fused": True} if device.type == "cuda" else {}
        self._full = torch.optim.AdamW(self._large.values(), rate, betas, weight_decay=0.0, **fast)
        self._adam = torch.optim.AdamW(self._small.values(), rate, betas, weight_decay=0.0)
        self._pulled = {name: torch.zeros_like(weight) for name, weight in self._small.items()}
        self.norm = 0.0
        """Of the last step's gradient of the small model, before it was bounded by 1."""
        self.cosine: float | None = None
        """Of the gradient that was pulled back with the small model's own, where its loss was propagated back too: that
        the padded model's passes compute what is learnt."""
        self._checksums = self.checksums()

    @torch.no_grad()
    def gather(self) -> None:
        """Pulls the padded model's gradients back, adds them up, and lets them be zero."""
        for name, block in self._blocks.items():
            gradient = self._large[block.name].grad
            if gradient is not None:
                pulled = self._pulled[name]
                pulled.add_(block.of(gradient).to(pulled), alpha=block.scale)
        for weight in self._large.values():
            if weight.grad is not None:
                weight.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of both. Raises ValueError: a closure, which is for optimisers that try several times."""
        if closure is not None:
            raise ValueError("PaddedAdamW takes no closure: call backward before step()")
        self.gather()
        self.cosine = self._cosine()
        for name, weight in self._small.items():
            weight.grad = self._pulled[name]
        self.norm = nn.utils.clip_grad_norm_(self._small.values(), LONGEST_GRADIENT).item()
        for adam in (self._full, self._adam):
            for group in adam.param_groups:
                group["lr"] = self.param_groups[0]["lr"]  # a schedule sets ours
            adam.step()
        self.push()
        for gradient in self._pulled.values():
            gradient.zero_()
        for weight in (*self._large.values(), *self._small.values()):
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Of the small model, which settles everything: the padded one's moments are zero for ever."""
        return {"small": {name: each.detach() for name, each in self._small.items()}, "adam": self._adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self._small.items():
            weight.copy_(state["small"][name])
        self._adam.load_state_dict(state["adam"])
        self.push()

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        """Of the bits of each padded weight's padding, by its name."""
        mine = {block.name: block for block in self._blocks.values()}
        return {name: _checksum(weight, mine.get(name)) for name, weight in self._large.items()}

    def changed(self) -> list[str]:
        """Padded weights whose padding is not, bit for bit, what it was at the beginning."""
        now = self.checksums()
        return [name for name, before in self._checksums.items() if now[name] != before]

    @torch.no_grad()
    def push(self) -> None:
        """Writes the padded weights, after somebody else has written the small ones."""
        for name, block in self._blocks.items():
            large = self._large[block.name]
            block.put(large, self._small[name].detach().to(large.device) * block.scale)

    def _cosine(self) -> float | None:
        own = {name: weight.grad for name, weight in self._small.items() if weight.grad is not None}
        if not own:
            return None
        both = [(self._pulled[name].double(), gradient.double()) for name, gradient in own.items()]
        product = sum((one * other).sum() for one, other in both)
        norms = [sum(each[i].square().sum() for each in both) ** 0.5 for i in range(2)]
        return float(product / (norms[0] * norms[1]))


def _checksum(weight: Tensor, block: Block | None) -> int:
    """Of its bits but for the block's: column by column, so that no two columns may be exchanged."""
    bits = weight.view(BITS[weight.element_size()])
    if block is not None:
        bits = bits.clone()
        block.put(bits, torch.zeros_like(block.of(bits)))
    sums = bits.sum(0, dtype=torch.int64) if bits.dim() > 1 else bits.long()
    return int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum())
