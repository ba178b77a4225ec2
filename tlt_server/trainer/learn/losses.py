"""What a drafter learns from: p is the target's law, q the drafter's, f and g the target's and the drafter's state.

    EAGLE     state 1, token 0.1, 1 step     L = smooth_l1(g, f) - 0.1 sum_x p(x) log q(x)        arXiv 2401.15077
    HASS      the same in 3 aligned steps    a step reads what those before it made; to the loss   arXiv 2408.15766
                                             comes - sum_x p(x) log q(x) over the 10 likeliest x
    EAGLE-3   token alone, 0.8^k in step k   no state to match: training-time test                 arXiv 2503.01840

For the token there is, in place of the cross entropy, with a = sum_x min(p(x), q(x)), which a draft is accepted with
where noise is not shared:

    total_variation   1 - a                                                                        arXiv 2310.08461
    lk                - log a: the same direction, and no smaller where a is small                 arXiv 2602.23881
    lk_hybrid         w CE + (1 - w) (1 - a), w = e^(-3 a): cross entropy first, then variation    arXiv 2602.23881
    hits              - log h(x) of the token x that the target took, by noise that both share     drafter/hits.py

With L the total variation, at most 2L / (1 + L) of the drafts miss, by noise that drafter and target share (arXiv
2408.07978).

Where a drafter knows a part of the vocabulary, sums run over that part and p is not scaled up to one: so each position
counts by how much of the target's law the drafter can reach at all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.trainer.learn.chains import Frozen, Step, draft, drafter_logits, target_law
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack

LOGITS = 1 << 27
"""That are in memory at once: 0.5 GB for each float32 tensor of them, 883 rows at a vocabulary of 152k."""
LIKELIEST = 10
"""Tokens of HASS's second loss."""
LK_DECAY = 3.0
LEAST = 1e-30


def rows_at_once(vocabulary: int) -> int:
    """Whose logits may be in memory together; small vocabularies need no thousand calls then."""
    return max(1, LOGITS // vocabulary)


def cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """-sum_x p(x) log q(x) of each row; logits of q and law p [R, V'] -> [R]."""
    return -(law * logits.log_softmax(-1)).sum(-1)


def likeliest(logits: Tensor, law: Tensor) -> Tensor:
    """The cross entropy over the target's LIKELIEST tokens alone; [R, V'] -> [R]."""
    most = law.topk(min(LIKELIEST, law.shape[-1]))
    return -(most.values * logits.log_softmax(-1).gather(-1, most.indices)).sum(-1)


def overlap(logits: Tensor, law: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) of each row; [R, V'] -> [R]."""
    return torch.minimum(law, logits.softmax(-1)).sum(-1)


def total_variation(logits: Tensor, law: Tensor) -> Tensor:
    """One less the overlap: the distance max_A |p(A) - q(A)|; [R, V'] -> [R]."""
    return 1 - overlap(logits, law)


def lk(logits: Tensor, law: Tensor) -> Tensor:
    """-log of the overlap; [R, V'] -> [R]."""
    return -overlap(logits, law).clamp(min=LEAST).log()


def lk_hybrid(logits: Tensor, law: Tensor) -> Tensor:
    """Cross entropy where little overlaps, total variation where much does; [R, V'] -> [R]."""
    overlapping = overlap(logits, law)
    weight = (-LK_DECAY * overlapping.detach()).exp()
    return weight * cross_entropy(logits, law) + (1 - weight) * (1 - overlapping)


def hits(logits: Tensor, law: Tensor, taken: Tensor) -> Tensor:
    """-log h(x) of each row at full noise, x = taken [R], a row of the drafter's vocabulary; where the drafter does not
    know the token (-1) nothing is to be learnt. [R, V'] -> [R].

    -log h(x) = log r + log sum_y max(p(y) / r, q(y)), r = p(x) / q(x); tokens that the drafter does not know are in p.
    """
    known, at = taken >= 0, taken.clamp(min=0)[:, None]
    logs = logits.log_softmax(-1)
    ratio = law.gather(-1, at)[:, 0].clamp(min=LEAST).log() - logs.gather(-1, at)[:, 0]
    scaled = law.clamp(min=LEAST).log() - ratio[:, None]
    unknown = (1 - law.sum(-1)).clamp(min=LEAST).log() - ratio
    total = torch.cat((torch.maximum(scaled, logs), unknown[:, None]), -1).logsumexp(-1)
    return torch.where(known, ratio + total, 0.0)


def smooth_l1(state: Tensor, wanted: Tensor) -> Tensor:
    """Mean over H of d^2 / 2 if |d| < 1, else |d| - 1/2; d = state - wanted; [R, H] -> [R] (arXiv 1504.08083, 3)."""
    return F.smooth_l1_loss(state.float(), wanted.float(), reduction="none").mean(-1)


TokenLoss: TypeAlias = Literal["cross_entropy", "total_variation", "lk", "lk_hybrid", "hits"]
OF_LAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}
"""Those that the two laws tell."""


def token_loss(name: TokenLoss, logits: Tensor, law: Tensor, taken: Tensor) -> Tensor:
    """By its name; [R, V'], [R, V'], [R] -> [R]."""
    return hits(logits, law, taken) if name == "hits" else OF_LAWS[name](logits, law)


@dataclass(frozen=True)
class Objective:
    """Which loss. steps: of each chain. decay: weight of a step by that of the one before it. token, likeliest, state:
    weights."""

    steps: int
    decay: float = 1.0
    token: float = 1.0
    likeliest: float = 0.0
    state: float = 0.0
    token_loss: TokenLoss = "cross_entropy"


EAGLE = Objective(steps=1, token=0.1, state=1.0)
HASS = Objective(steps=3, token=0.1, likeliest=1.0, state=1.0)
EAGLE3 = Objective(steps=8, decay=0.8)
"""As deep as the trees that servers try; drafts beyond, of deeper chains, would weigh a sixth and less. Its authors
unroll seven steps."""


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
    def portion(reads: Tensor, finals: Tensor, taken: Tensor) -> Tensor:
        total = reads.new_zeros((), dtype=torch.float32)
        if objective.token or objective.likeliest:
            with torch.no_grad():
                law = target_law(frozen, finals)
                law = law if network.draft_tokens is None else law[:, network.draft_tokens]
            logits = drafter_logits(network, frozen, reads)
            if objective.token:
                total = total + objective.token * token_loss(objective.token_loss, logits, law, taken).sum()
            if objective.likeliest:
                total = total + objective.likeliest * likeliest(logits, law).sum()
        if objective.state:
            total = total + objective.state * smooth_l1(reads, finals).sum()
        return total

    rows = step.counts.nonzero()[:, 0]
    given = pack.finals[step.at[rows]], _taken(network, frozen, pack, step.at[rows])
    reads, at_once = step.reads[rows], rows_at_once(len(frozen.head))
    if not torch.is_grad_enabled():
        parts = zip(*(each.split(at_once) for each in (reads, *given)), strict=True)
        return torch.stack([portion(*some) for some in parts]).sum()
    heads = () if network.own_head is None else (network.own_head,)
    total: Tensor = _Portions.apply(portion, at_once, reads, given, *heads)
    return total


def _taken(network: Network, frozen: Frozen, pack: Pack, at: Tensor) -> Tensor:
    """What the target took after each of these entries, as the drafter numbers tokens; -1: it does not know it, or it
    is beyond the run's end."""
    taken = torch.where(at < pack.last[at], pack.tokens[(at + 1).clamp(max=len(pack.tokens) - 1)], -1)
    if network.draft_tokens is None:
        return taken
    numbers = taken.new_full((len(frozen.head),), -1)
    numbers[network.draft_tokens] = torch.arange(len(network.draft_tokens), device=taken.device)
    return torch.where(taken >= 0, numbers[taken.clamp(min=0)], -1)


class _Portions(torch.autograd.Function):
    """A sum over rows, in portions whose gradient is taken while their logits are there.

    All logits at once would not fit into memory; made again for the backward pass, they would take five products with
    the head where three do (as in Liger Kernel's fused linear cross entropy, arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        portion: Callable[[Tensor, Tensor, Tensor], Tensor],
        rows: int,
        reads: Tensor,
        given: tuple[Tensor, Tensor],
        *heads: Tensor,
    ) -> Tensor:
        """portion: sum over some rows of reads and what is given, so many at once; `heads`, which it may use, learn
        too."""
        total = reads.new_zeros((), dtype=torch.float32)
        of_reads, of_heads = [], [torch.zeros_like(head) for head in heads]
        for some, *wanted in zip(*(each.split(rows) for each in (reads, *given)), strict=True):
            with torch.enable_grad():
                learning = some.detach().requires_grad_()
                value = portion(learning, *wanted)
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
