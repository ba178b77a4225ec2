"""Is a drafter better than the active one: its expected accept length on features that it never learnt from.

The expected accept length of a chain of d drafts, bonus token included, is 1 + sum_{k<=d} P(the first k are accepted).
With x_1, x_2, ... the tokens that the target itself sampled after the chain's start, p_k and q_k the two laws there,

    P(the first k are accepted) = E[ prod_{m<k} min(1, q_m(x_m) / p_m(x_m)) * sum_x min(p_k(x), q_k(x)) ]

because a draft x ~ q is accepted with probability min(1, p(x) / q(x)), so that it is accepted *and* is x with
probability min(p(x), q(x)) = p(x) min(1, q(x) / p(x)) (Leviathan et al., arXiv 2211.17192). A server that drafts the
likeliest token instead of sampling, as ours does, is the case where q_k is one at that token.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from tlt_server.trainer.learn.chains import Frozen, autocast, draft, drafter_law, target_law
from tlt_server.trainer.learn.losses import rows_at_once
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack

Drafts = Literal["likeliest", "sampled"]


@torch.no_grad()
def accept_length(
    network: Network,
    frozen: Frozen,
    packs: Iterable[Pack],
    depth: int,
    temperature: float = 1.0,
    drafts: Drafts = "likeliest",
) -> float:
    """Expected accept length of chains of `depth` drafts, 1 to depth + 1, over all tokens that a chain can start from.

    A server's own average is a little lower: its chains start where others ended, at tokens that are hard to draft.

    packs: features of rollouts that were sampled at `temperature`. Only chains that end within their run count.

    Raises ValueError: no run is so long.
    """
    total, chains = 0.0, 0
    for pack in packs:
        with autocast(pack.tokens.device):
            lengths = _lengths(network, frozen, pack, depth, temperature, drafts)
        total, chains = total + lengths.sum().item(), chains + len(lengths)
    if not chains:
        raise ValueError(f"no run of {depth + 1} tokens or more to judge by")
    return total / chains


def _lengths(network: Network, frozen: Frozen, pack: Pack, depth: int, temperature: float, drafts: Drafts) -> Tensor:
    """Of each whole chain of the pack, [R] float64."""
    whole = pack.ahead(depth - 1)[1].nonzero()[:, 0]
    lengths = torch.ones(len(whole), dtype=torch.float64, device=whole.device)
    reached = torch.ones_like(lengths)
    for step in draft(network, frozen, pack, depth):
        at = step.at[whole]
        following = pack.tokens[pack.ahead(1)[0][at]]  # at the end of a run it is another token; no step comes after
        parts = []
        for rows in torch.arange(len(whole), device=whole.device).split(rows_at_once(len(frozen.head))):
            target = target_law(frozen, pack.finals[at[rows]], temperature)
            drafter = drafter_law(network, frozen, step.reads[whole[rows]], temperature)
            if drafts == "likeliest":
                drafter = F.one_hot(drafter.argmax(-1), drafter.shape[-1])
            parts.append(_acceptance(target, drafter, following[rows]))
        accepted, goes_on = (torch.cat(part) for part in zip(*parts, strict=True))
        lengths += reached * accepted
        reached *= goes_on
    return lengths


def _acceptance(target: Tensor, drafter: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """sum_x min(p(x), q(x)), and min(1, q / p) at the token that the target said; laws [R, V], said [R] -> [R] each."""
    accepted = torch.minimum(target, drafter).sum(-1)
    p, q = (law.gather(-1, said[:, None])[:, 0] for law in (target, drafter))
    return accepted, (q / p.clamp(min=1e-20)).clamp(max=1)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At once where that helps after a publication of the target, else by a margin, or after so many steps.

    margin: share by which the expected accept length must grow; smaller differences are noise, or not worth a swap.
    every: training steps since the last publication of the drafter after which any gain is enough.
    floor: expected accept length that a drafter must reach at all; one below makes no rollout faster, and a server's
        watchdog would switch speculation off again.
    """

    margin: Annotated[float, Meta(ge=0)] = 0.01
    every: Annotated[int, Meta(ge=1)] = 1000
    floor: Annotated[float, Meta(ge=1)] = 1.2

    def reason(self, candidate: float, live: float, *, target_moved: bool, steps: int) -> str | None:
        """Why to publish now, or None to go on training. A drafter that is not better is never published.

        candidate, live: expected accept lengths of the drafter in training and of the active one, on the same features.
        target_moved: the target was published since a drafter last was. steps: of training since then.
        """
        if not candidate > live or candidate < self.floor:  # so that one that diverged, which is NaN, stays here
            return None
        gain = f"accept length {live:.3f} -> {candidate:.3f}"
        if candidate >= live * (1 + self.margin):
            return gain
        if target_moved:
            return f"{gain}, the target moved"
        return f"{gain} after {steps} steps" if steps >= self.every else None
