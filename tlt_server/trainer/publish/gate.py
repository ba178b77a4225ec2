"""Is a drafter better than the active one: its expected accept length on features that it never learnt from.

The expected accept length of a chain of d drafts, bonus token included, is 1 + sum_{k<=d} P(the first k are accepted).
With x_1, x_2, ... the tokens that the target itself sampled after the chain's start, p_k and q_k the two laws there,

    P(the first k are accepted) = E[ prod_{m<k} min(1, q_m(x_m) / p_m(x_m)) * sum_x min(p_k(x), q_k(x)) ]

because a draft x ~ q is accepted with probability min(1, p(x) / q(x)), so that it is accepted *and* is x with
probability min(p(x), q(x)) = p(x) min(1, q(x) / p(x)) (Leviathan et al., arXiv 2211.17192). A server that drafts the
likeliest token instead of sampling, as ours does, is the case where q_k is one at that token.

Two drafters are compared on the same chains, and how sure it is that one is better is told by the bootstrap over
requests (Efron, 1979): chains of one request are much alike, and what holds for a few may not hold for the next.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

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


SURE = 0.95
"""Of the bootstrap's resamples, those that a gain must be above."""

RESAMPLES = 2000


class Sum(NamedTuple):
    """Of the expected accept lengths of chains."""

    chains: int
    total: float


def mean(sums: Mapping[str, Sum]) -> float:
    """Over all chains, of whatever request."""
    return sum(each.total for each in sums.values()) / sum(each.chains for each in sums.values())


def sure_gain(candidate: Mapping[str, Sum], other: Mapping[str, Sum]) -> float:
    """By what share of `other`'s mean the candidate's is surely longer, on the same chains of the same requests: the
    lower end of the one-sided interval of `SURE`. Negative where it may be shorter."""
    totals = torch.tensor([(candidate[each].total, other[each].total) for each in sorted(other)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)  # the same sums give the same interval
    drawn = torch.randint(len(totals), (RESAMPLES, len(totals)), generator=generator)
    mine, others = totals[drawn].sum(1).unbind(-1)
    return float(torch.quantile(mine / others - 1, 1 - SURE))


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
    return mean(by_request(network, frozen, packs, depth, temperature, drafts))


def by_request(
    network: Network,
    frozen: Frozen,
    packs: Iterable[Pack],
    depth: int,
    temperature: float = 1.0,
    drafts: Drafts = "likeliest",
) -> dict[str, Sum]:
    """As `accept_length`, for each request that has such a chain. Raises ValueError: none has."""
    found: dict[str, Sum] = {}
    for pack in packs:
        at, lengths = chain_lengths(network, frozen, pack, depth, temperature, drafts)
        for (first, stop), request in zip(pack.bounds, pack.requests, strict=False):  # the last may be a filler
            mine = lengths[(first <= at) & (at < stop)]
            before = found.get(request, Sum(0, 0.0))
            if len(mine):
                found[request] = Sum(before.chains + len(mine), before.total + mine.sum().item())
    if not found:
        raise ValueError(f"no run of {depth + 1} tokens or more to judge by")
    return found


@torch.no_grad()
def chain_lengths(
    network: Network, frozen: Frozen, pack: Pack, depth: int, temperature: float = 1.0, drafts: Drafts = "likeliest"
) -> tuple[Tensor, Tensor]:
    """The entries of a pack where whole chains begin, [R] int64, and their expected accept lengths, [R] float64."""
    with autocast(pack.tokens.device):
        return _chain_lengths(network, frozen, pack, depth, temperature, drafts)


def _chain_lengths(
    network: Network, frozen: Frozen, pack: Pack, depth: int, temperature: float, drafts: Drafts
) -> tuple[Tensor, Tensor]:
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
    return whole, lengths


def _acceptance(target: Tensor, drafter: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """sum_x min(p(x), q(x)), and min(1, q / p) at the token that the target said; laws [R, V], said [R] -> [R] each."""
    accepted = torch.minimum(target, drafter).sum(-1)
    p, q = (law.gather(-1, said[:, None])[:, 0] for law in (target, drafter))
    return accepted, (q / p.clamp(min=1e-20)).clamp(max=1)


class Judged(NamedTuple):
    """Expected accept lengths of the drafter in training and of the active one, on the same features of so many
    requests. surely: the share that it gains at least (`sure_gain`); of several that it must be better than, the
    least."""

    candidate: float
    live: float
    surely: float
    requests: int


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At once where that helps after a publication of the target, else by a margin, or after so many steps; and only
    what is surely better.

    requests: that it must be judged by, unless it waits for `every` steps already.
    margin: share by which the expected accept length must grow; smaller differences are noise, or not worth a swap.
    every: training steps since the last publication of the drafter after which any gain is enough.
    floor: expected accept length that a drafter must reach at all; one below makes no rollout faster, and a server's
        watchdog would switch speculation off again.
    """

    requests: Annotated[int, Meta(ge=1)] = 4
    margin: Annotated[float, Meta(ge=0)] = 0.01
    every: Annotated[int, Meta(ge=1)] = 1000
    floor: Annotated[float, Meta(ge=1)] = 1.2

    def reason(self, judged: Judged, *, target_moved: bool, steps: int) -> str | None:
        """Why to publish now, or None to go on training. A drafter that is not surely better is never published.

        target_moved: the target was published since a drafter last was. steps: of training since then.
        """
        candidate, live = judged.candidate, judged.live
        # said so that a drafter that diverged, whose lengths are NaN, stays here
        enough = judged.requests >= self.requests or steps >= self.every
        if not (candidate >= self.floor and judged.surely > 0 and enough):
            return None
        gain = f"accept length {live:.3f} -> {candidate:.3f}"
        if candidate >= live * (1 + self.margin):
            return gain
        if target_moved:
            return f"{gain}, the target moved"
        return f"{gain} after {steps} steps" if steps >= self.every else None
