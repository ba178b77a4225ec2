"""Is a drafter better than the active one: its expected accept length on features that it never learnt from.

The expected accept length of a chain of d drafts, bonus token included, is 1 + sum_{k<=d} P(the first k are accepted).
A draft is accepted if it is the token that the target takes, by noise that both share. With x_1, x_2, ... the tokens
that the target took after the chain's start, and h_k what drafter/hits.py says of them,

    P(the first k are accepted, given x) = prod_{m<=k} h_m(x_m)

which is exact: no noise is drawn, nor need that of the server be known. Its mean over rollouts is the expectation. A
drafter is judged at the beta that is best for it, as servers find it by what they measure.

Two drafters are compared on the same chains, and how sure it is that one is better is told by the bootstrap over
requests (Efron, 1979): chains of one request are much alike, and what holds for a few may not hold for the next.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from tlt_server.drafter.hits import SHARPNESS, hit_probability
from tlt_server.trainer.learn.chains import Frozen, autocast, draft, drafter_law, target_law
from tlt_server.trainer.learn.losses import rows_at_once
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack

SURE = 0.95
"""Of the bootstrap's resamples, those that a gain must be above."""

RESAMPLES = 2000


class Sum(NamedTuple):
    """Of the expected accept lengths of chains. reached: of the drafts at each position, how many are expected to be
    accepted, with all before them."""

    chains: int
    total: float
    reached: tuple[float, ...] = ()


def mean(sums: Mapping[str, Sum]) -> float:
    """Over all chains, of whatever request."""
    return sum(each.total for each in sums.values()) / sum(each.chains for each in sums.values())


def by_position(sums: Mapping[str, Sum]) -> tuple[float, ...]:
    """The share of chains whose first 1, 2, ... drafts are all accepted; one more than their sum is the mean."""
    chains = sum(each.chains for each in sums.values())
    return tuple(sum(column) / chains for column in zip(*(each.reached for each in sums.values()), strict=True))


def sure_gain(candidate: Mapping[str, Sum], other: Mapping[str, Sum]) -> float:
    """By what share of `other`'s mean the candidate's is surely longer, on the same chains of the same requests: the
    lower end of the one-sided interval of `SURE`. Negative where it may be shorter."""
    totals = torch.tensor([(candidate[each].total, other[each].total) for each in sorted(other)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)  # the same sums give the same interval
    drawn = torch.randint(len(totals), (RESAMPLES, len(totals)), generator=generator)
    mine, others = totals[drawn].sum(1).unbind(-1)
    return float(torch.quantile(mine / others - 1, 1 - SURE))


def accept_length(
    network: Network, frozen: Frozen, packs: Iterable[Pack], depth: int, temperature: float = 1.0
) -> float:
    """Expected accept length of chains of `depth` drafts, 1 to depth + 1, over all tokens that a chain can start from.

    A server's own average is a little lower: its chains start where others ended, at tokens that are hard to draft.

    packs: features of rollouts that were sampled at `temperature`. Only chains count whose drafts are all followed, in
    their run, by what the target took.

    Raises ValueError: no run is so long.
    """
    return mean(by_request(network, frozen, packs, depth, temperature))


def by_request(
    network: Network, frozen: Frozen, packs: Iterable[Pack], depth: int, temperature: float = 1.0
) -> dict[str, Sum]:
    """As `accept_length`, for each request that has such a chain; all at one of SHARPNESS, the best over all. Raises
    ValueError: none has."""
    chains: dict[str, int] = {}
    totals: dict[str, Tensor] = {}
    for pack in packs:
        at, reached = chain_reach(network, frozen, pack, depth, temperature)
        for (first, stop), request in zip(pack.bounds, pack.requests, strict=False):  # the last may be a filler
            mine = reached[(first <= at) & (at < stop)]
            if len(mine):
                chains[request] = chains.get(request, 0) + len(mine)
                totals[request] = totals.get(request, 0) + mine.sum(0)
    if not chains:
        raise ValueError(f"no run of {depth + 2} tokens or more to judge by")
    best = torch.stack([*totals.values()]).sum((0, 1)).argmax()
    reached = {request: total[:, best].tolist() for request, total in totals.items()}
    return {
        request: Sum(count, count + sum(reached[request]), (*reached[request],)) for request, count in chains.items()
    }


@torch.no_grad()
def chain_reach(
    network: Network, frozen: Frozen, pack: Pack, depth: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The entries of a pack where whole chains begin, [R] int64, and how likely their first 1 to `depth` drafts are all
    accepted at each of SHARPNESS, [R, depth, len(SHARPNESS)] float64; one more than their sum is the accept length."""
    with autocast(pack.tokens.device):
        whole = pack.ahead(depth)[1].nonzero()[:, 0]
        reached = [torch.ones(len(whole), len(SHARPNESS), dtype=torch.float64, device=whole.device)]
        for step in draft(network, frozen, pack, depth):
            parts = []
            for rows in whole.split(rows_at_once(len(frozen.head))):
                target = target_law(frozen, pack.finals[step.at[rows]], temperature)
                drafter = drafter_law(network, frozen, step.reads[rows], temperature)
                parts.append(hit_probability(target, drafter, pack.tokens[step.at[rows] + 1]))
            reached.append(reached[-1] * torch.cat(parts))
    return whole, torch.stack(reached[1:], 1)


class Judged(NamedTuple):
    """Expected accept lengths of the drafter in training and of the active one, on the same features of so many
    requests. surely: the share that it gains at least (`sure_gain`); of several that it must be better than, the
    least. candidate_reaches, live_reaches: `by_position`."""

    candidate: float
    live: float
    surely: float
    requests: int
    candidate_reaches: tuple[float, ...] = ()
    live_reaches: tuple[float, ...] = ()


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
