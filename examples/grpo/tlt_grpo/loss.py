"""The clipped objective, token by token. Tensors are [B, T]; `counts` is true where the policy sampled the token."""

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Sums over the tokens that count, as scalars; divide by their number for means."""

    objective: Tensor
    """To be minimised; carries the gradient."""
    clipped: Tensor
    """Tokens whose gradient the clip took away."""
    drift: Tensor
    """Estimates KL(old || new) in nats."""


def clipped_terms(new: Tensor, old: Tensor, advantages: Tensor, counts: Tensor, low: float, high: float) -> Terms:
    """PPO's objective with GRPO's advantages.

    -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(new - old). Two widths: DAPO's clip-higher (arXiv 2503.14476),
    which lets an unlikely token grow. The caller divides by the tokens of all responses together, as DAPO does:
    GRPO's mean over each response first makes a token of a long one count less.

    Args:
        new: log-probabilities under the policy that is trained.
        old: under the policy that sampled, from the server.
        advantages: [B], one for each response.
    """
    ratio = (new - old).exp()
    gain = advantages[:, None]
    free, held = ratio * gain, ratio.clamp(1 - low, 1 + high) * gain
    clipped = (held < free) & counts
    # the estimator k3 of joschu.net/blog/kl-approx.html: never negative, and its expectation is that of -log r
    drift = ratio.detach() - 1 - (new - old).detach()
    return Terms(-(free.minimum(held) * counts).sum(), clipped.sum(), (drift * counts).sum())


def divergence(new: Tensor, start: Tensor, counts: Tensor) -> Tensor:
    """What GRPO punishes: an estimate of KL(new || start) in nats, summed over tokens (arXiv 2402.03300, equation 4).

    A token that the start thought far likelier makes it huge. So what is logged is the mean of new - start, which has
    the same expectation where the policy itself sampled.
    """
    back = start - new
    return ((back.exp() - 1 - back) * counts).sum()
