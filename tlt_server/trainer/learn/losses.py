"""What a drafter learns from: p is the target's law, q the drafter's, f and g the target's and the drafter's state.

    EAGLE     state 1, token 0.1, 1 step     L = smooth_l1(g, f) - 0.1 sum_x p(x) log q(x)        arXiv 2401.15077
    HASS      the same in 3 aligned steps    a step reads what those before it made; its second    arXiv 2408.15766
                                             loss, over the ten likeliest tokens, is left out
    EAGLE-3   token alone, 0.8^k in step k   no state to match: training-time test, 7 steps long   arXiv 2503.01840
    TV        total variation for the token  L = 1 - sum_x min(p(x), q(x))                         arXiv 2310.08461

With L the total variation, at most 2L / (1 + L) of the drafts miss, by noise that drafter and target share (arXiv
2408.07978).

Where a drafter knows a part of the vocabulary, sums run over that part and p is not scaled up to one: so each position
counts by how much of the target's law the drafter can reach at all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.trainer.learn.chains import Frozen, Step, draft, drafter_logits, target_law
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack

LOGITS = 1 << 27
"""That are in memory at once: 0.5 GB for each float32 tensor of them, 883 rows at a vocabulary of 152k."""


def rows_at_once(vocabulary: int) -> int:
    """Whose logits may be in memory together; small vocabularies need no thousand calls then."""
    return max(1, LOGITS // vocabulary)


def cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """-sum_x p(x) log q(x) of each row; logits of q and law p [R, V'] -> [R]."""
    return -(law * logits.log_softmax(-1)).sum(-1)


def total_variation(logits: Tensor, law: Tensor) -> Tensor:
    """1 - sum_x min(p(x), q(x)) of each row: the distance max_A |p(A) - q(A)|; [R, V'] -> [R]."""
    return 1 - torch.minimum(law, logits.softmax(-1)).sum(-1)


def smooth_l1(state: Tensor, wanted: Tensor) -> Tensor:
    """Mean over H of d^2 / 2 if |d| < 1, else |d| - 1/2; d = state - wanted; [R, H] -> [R] (arXiv 1504.08083, 3)."""
    return F.smooth_l1_loss(state.float(), wanted.float(), reduction="none").mean(-1)


TOKEN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
}


@dataclass(frozen=True)
class Objective:
    """Which loss. steps: of each chain. decay: weight of a step by that of the one before it. token, state: weights."""

    steps: int
    decay: float = 1.0
    token: float = 1.0
    state: float = 0.0
    token_loss: Literal["cross_entropy", "total_variation"] = "cross_entropy"


EAGLE = Objective(steps=1, token=0.1, state=1.0)
HASS = Objective(steps=3, token=0.1, state=1.0)
EAGLE3 = Objective(steps=7, decay=0.8)


def loss(network: Network, frozen: Frozen, pack: Pack, objective: Objective) -> Tensor:
    """Mean over the rows that count in each step, then over the steps by their weights: a scalar in float32."""
    weights = [objective.decay**step for step in range(objective.steps)]
    means = step_means(network, frozen, pack, objective)
    return torch.stack([weight * mean for weight, mean in zip(weights, means, strict=True)]).sum() / sum(weights)


def step_means(network: Network, frozen: Frozen, pack: Pack, objective: Objective) -> Iterator[Tensor]:
    """The loss of each step, a mean over the rows that count; zero where none does."""
    for step in draft(network, frozen, pack, objective.steps):
        yield _sum(network, frozen, pack, objective, step) / step.counts.sum().clamp(min=1)


def _sum(network: Network, frozen: Frozen, pack: Pack, objective: Objective, step: Step) -> Tensor:
    def portion(reads: Tensor, finals: Tensor) -> Tensor:
        total = reads.new_zeros((), dtype=torch.float32)
        if objective.token:
            with torch.no_grad():
                law = target_law(frozen, finals)
                law = law if network.draft_tokens is None else law[:, network.draft_tokens]
            token_loss = TOKEN_LOSSES[objective.token_loss]
            total = total + objective.token * token_loss(drafter_logits(network, frozen, reads), law).sum()
        if objective.state:
            total = total + objective.state * smooth_l1(reads, finals).sum()
        return total

    rows = step.counts.nonzero()[:, 0]
    reads, finals, at_once = step.reads[rows], pack.finals[step.at[rows]], rows_at_once(len(frozen.head))
    if not torch.is_grad_enabled():
        parts = zip(reads.split(at_once), finals.split(at_once), strict=True)
        return torch.stack([portion(*some) for some in parts]).sum()
    heads = () if network.own_head is None else (network.own_head,)
    total: Tensor = _Portions.apply(portion, at_once, reads, finals, *heads)
    return total


class _Portions(torch.autograd.Function):
    """A sum over rows, in portions whose gradient is taken while their logits are there.

    All logits at once would not fit into memory; made again for the backward pass, they would take five products with
    the head where three do (as in Liger Kernel's fused linear cross entropy, arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        portion: Callable[[Tensor, Tensor], Tensor],
        rows: int,
        reads: Tensor,
        finals: Tensor,
        *heads: Tensor,
    ) -> Tensor:
        """portion: sum over some rows of reads and finals, so many at once; `heads`, which it may use, learn too."""
        total = reads.new_zeros((), dtype=torch.float32)
        of_reads, of_heads = [], [torch.zeros_like(head) for head in heads]
        for some, wanted in zip(reads.split(rows), finals.split(rows), strict=True):
            with torch.enable_grad():
                learning = some.detach().requires_grad_()
                value = portion(learning, wanted)
                gradient, *more = torch.autograd.grad(value, (learning, *heads), materialize_grads=True)
            total += value.detach()
            of_reads.append(gradient)
            for gathered, each in zip(of_heads, more, strict=True):
                gathered.add_(each)
        ctx.save_for_backward(torch.cat(of_reads), *of_heads)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_reads, *of_heads = (gradient * saved for saved in ctx.saved_tensors)
        return None, None, of_reads, None, *of_heads
