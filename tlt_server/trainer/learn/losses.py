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
counts by how much of the target's law the drafter can reach at all. Where it has the target's whole head, and learns
its states too, which keeps the other tokens where the target has them, they run over those tokens that p has most of in
some hundred entries: products with a head of 150,000 rows would take most of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.trainer.learn.chains import Frozen, draft, drafter_logits, target_law
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack

LOGITS = 1 << 27
"""That are in memory at once: 0.5 GB for each float32 tensor of them, 883 rows at a vocabulary of 152k."""
LIKELIEST = 10
"""Tokens of HASS's second loss."""
SUMMED = 16_384
"""Tokens that sums run over, where the vocabulary is at least four times as large: half of those that a server lets its
drafter propose, for these are of some entries alone."""
LK_DECAY = 3.0
LEAST = 1e-30


def rows_at_once(vocabulary: int) -> int:
    """Whose logits may be in memory together; small vocabularies need no thousand calls then."""
    return max(1, LOGITS // vocabulary)


def cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """-sum_x p(x) log q(x) of each row; logits of q and law p [R, V'] -> [R]."""
    return -(law * logits.log_softmax(-1)).sum(-1)


def likeliest(logits: Tensor, chances: Tensor, tokens: Tensor) -> Tensor:
    """The cross entropy over the target's LIKELIEST tokens alone; [R, V'], [R, 10] both -> [R]."""
    return -(chances * logits.log_softmax(-1).gather(-1, tokens)).sum(-1)


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


def step_means(network: Network, frozen: Frozen, pack: Pack, objective: Objective) -> list[Tensor]:
    """The loss of each step, a mean over the rows that count; zero where none does."""
    steps = list(draft(network, frozen, pack, objective.steps))
    rows = [step.counts.nonzero()[:, 0] for step in steps]
    reads, at = ([getattr(step, name)[of] for step, of in zip(steps, rows, strict=True)] for name in ("reads", "at"))
    portions = partial(_portions, network, frozen, pack, objective, at)
    heads = () if network.own_head is None else (network.own_head,)
    sums: Tensor = _Sums.apply(portions, torch.is_grad_enabled(), len(reads), *reads, *heads)
    return [each / max(1, len(of)) for each, of in zip(sums, rows, strict=True)]


Portion: TypeAlias = tuple[int, slice, Callable[[Tensor], Tensor]]


def _portions(
    network: Network, frozen: Frozen, pack: Pack, objective: Objective, at: Sequence[Tensor]
) -> Iterator[Portion]:
    """A step's number, some of its rows, and their loss by what the head reads of them: for some entries at a time, so
    that what the target says of these is made once for all steps. at: [R] of each step, the entries of its rows,
    ascending."""
    entries, size = len(pack.tokens), rows_at_once(len(frozen.head))
    begins = torch.arange(0, entries + size, size, device=pack.tokens.device)
    ends = torch.stack([torch.searchsorted(each, begins) for each in at]).tolist()
    taken = _taken(network, frozen, pack)
    for number in range(len(begins) - 1):
        begin = number * size
        target = _Target.of(network, frozen, objective, pack.finals[begin : begin + size], taken[begin : begin + size])
        for step, of_step in enumerate(ends):
            rows = slice(of_step[number], of_step[number + 1])
            if rows.start < rows.stop:
                some = target.at(at[step][rows] - begin)
                yield step, rows, partial(_sum, network, frozen, objective, some)


class _Target(NamedTuple):
    """What the target says of R entries. head: [V', H], which the drafter's logits are made by; None: its own, or the
    whole. finals: [R, H]. taken: [R]. law: [R, V'], None where no loss is of it; of its likeliest tokens chances and
    tokens, [R, 10]."""

    head: Tensor | None
    finals: Tensor
    taken: Tensor
    law: Tensor | None = None
    chances: Tensor | None = None
    tokens: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, network: Network, frozen: Frozen, objective: Objective, finals: Tensor, taken: Tensor) -> "_Target":
        if not objective.token and not objective.likeliest:
            return cls(None, finals, taken)
        law, head = target_law(frozen, finals), None
        if network.draft_tokens is not None:
            law = law[:, network.draft_tokens]
        elif network.own_head is None and objective.state and law.shape[-1] >= 4 * SUMMED:
            some = law.sum(0).topk(SUMMED).indices
            law, head, taken = law[:, some], frozen.head[some], _numbered(taken, some, len(frozen.head))
        most = law.topk(min(LIKELIEST, law.shape[-1])) if objective.likeliest else (None, None)
        return cls(head, finals, taken, law, *most)

    def at(self, entries: Tensor) -> "_Target":
        """Of these, ascending, alone."""
        if len(entries) == len(self.taken):
            return self
        return _Target(self.head, *(None if each is None else each[entries] for each in self[1:]))


def _sum(network: Network, frozen: Frozen, objective: Objective, target: _Target, reads: Tensor) -> Tensor:
    """The loss of R rows; reads: [R, H]."""
    total = reads.new_zeros((), dtype=torch.float32)
    if target.law is not None:
        logits = drafter_logits(network, frozen, reads, target.head)
        if objective.token:
            of_token = token_loss(objective.token_loss, logits, target.law, target.taken)
            total = total + objective.token * of_token.sum()
        if target.chances is not None and target.tokens is not None:
            total = total + objective.likeliest * likeliest(logits, target.chances, target.tokens).sum()
    if objective.state:
        total = total + objective.state * smooth_l1(reads, target.finals).sum()
    return total


def _taken(network: Network, frozen: Frozen, pack: Pack) -> Tensor:
    """What the target took after each entry, [N], as the drafter numbers tokens; -1: it does not know it, or it is
    beyond the run's end."""
    entries = len(pack.tokens)
    at = torch.arange(entries, device=pack.tokens.device)
    taken = torch.where(at < pack.last, pack.tokens[(at + 1).clamp(max=entries - 1)], -1)
    return taken if network.draft_tokens is None else _numbered(taken, network.draft_tokens, len(frozen.head))


def _numbered(taken: Tensor, some: Tensor, vocabulary: int) -> Tensor:
    """Tokens by their place in `some`; -1: they are not there."""
    numbers = taken.new_full((vocabulary,), -1)
    numbers[some] = torch.arange(len(some), device=taken.device)
    return torch.where(taken >= 0, numbers[taken.clamp(min=0)], -1)


class _Sums(torch.autograd.Function):
    """A sum for each step over its rows, in portions whose gradient is taken while their logits are there.

    All logits at once would not fit into memory; made again for the backward pass, they would take five products with
    the head where three do (as in Liger Kernel's fused linear cross entropy, arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any, portions: Callable[[], Iterator[Portion]], learns: bool, steps: int, *tensors: Tensor
    ) -> Tensor:
        """learns: whether gradients are wanted. tensors: what the head reads in each step, [R, H]; then heads that
        learn too, which portions use."""
        reads, heads = tensors[:steps], tensors[steps:]
        total = [torch.zeros((), device=tensors[0].device) for _ in reads]
        of_reads = [torch.zeros_like(each) for each in reads] if learns else []
        of_heads = [[torch.zeros_like(head) for head in heads] for _ in reads] if learns else []
        for step, rows, value_of in portions():
            with torch.set_grad_enabled(learns):
                learning = reads[step][rows].detach().requires_grad_(learns)
                value = value_of(learning)
                total[step] += value.detach()
                if not learns:
                    continue
                gradient, *more = torch.autograd.grad(value, (learning, *heads), materialize_grads=True)
            of_reads[step][rows] = gradient
            for gathered, each in zip(of_heads[step], more, strict=True):
                gathered.add_(each)
        ctx.steps = steps
        ctx.save_for_backward(*of_reads, *(each for of_step in of_heads for each in of_step))
        return torch.stack(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        steps, saved = ctx.steps, ctx.saved_tensors
        of_reads = [each * of_step for each, of_step in zip(gradient, saved[:steps], strict=True)]
        count = (len(saved) - steps) // steps
        of_heads = [
            torch.stack([gradient[step] * saved[steps + step * count + head] for step in range(steps)]).sum(0)
            for head in range(count)
        ]
        return None, None, None, *of_reads, *of_heads
