"""How often a drafter hits: how likely it proposes the token that the target takes.

By the shared noise g, a standard Gumbel variate for each token, the target takes the argmax of log p + g, and the
drafter proposes that of beta * log q + g. With clocks E = exp(-g), exponential variates, these are the tokens whose
E / p and E / w are least, w = q^beta. Given that E(x) = t, x is both if E(y) >= t * max(p(y) / p(x), w(y) / w(x)) for
every other y; hence, over all t,

    P(both are x) = 1 / sum_y max(p(y) / p(x), w(y) / w(x))

which tells how alike p is to w scaled to sum to one (arXiv 1809.04052). The target takes x with probability p(x). So,
where it has taken x, by whichever noise, the drafter had proposed x with probability

    h(x) = P(both are x) / p(x) = 1 / sum_y max(p(y), p(x) w(y) / w(x))

At beta 1 it is 1 where q is p; without noise 1 if x is what q finds best, else 0. Noise at different positions is
independent: a chain's first k drafts are the k tokens that the target took with the product of their h.
"""

import torch
from torch import Tensor

SHARPNESS = (1.0, 1.5, 2.0, 3.0, float("inf"))
"""Values of beta. In chains of 3 of the embedded models 1 is best for a drafter of nearly the target's law: 3.94
tokens, 3.89 at 2, 3.57 without noise. For one that has learnt less, at 2.35 tokens, 3 is, by a percent; and for one
that has hardly learnt, no noise: 1.47 tokens, 1.40 at 2."""

_LEAST = 1e-30


def hit_probability(target: Tensor, drafter: Tensor, taken: Tensor) -> Tensor:
    """h of each row's token at each of SHARPNESS: [R, len(SHARPNESS)].

    target, drafter: p and q, [R, V] float32. taken: [R] int64, what the target took.
    """
    at = taken[:, None]
    p, (sharpest, best) = target.gather(-1, at), drafter.max(-1, keepdim=True)
    sharp, found = drafter / sharpest, []
    for beta in SHARPNESS:
        if beta == torch.inf:
            found.append(((best == at) * sharp.gather(-1, best))[:, 0])  # of a drafter that diverged not a number
            continue
        weights = sharp if beta == 1 else sharp.pow(beta)
        w = weights.gather(-1, at)
        found.append(w[:, 0] / torch.maximum(target * w, p * weights).sum(-1).clamp(min=_LEAST))
    return torch.stack(found, -1)
