"""The clipped objective, token by token. Tensors are [N], of tokens that a policy sampled."""

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Sums over the tokens, as scalars; divide by their number for means."""

    objective: Tensor
    """To be minimised; carries the gradient."""
    clipped: Tensor
    """Tokens whose gradient the clip took away."""
    truncated: Tensor
    """Tokens whose importance weight was truncated."""
    drift: Tensor
    """Estimates KL(sampled || new) in nats."""


def clipped_terms(
    new: Tensor, old: Tensor, sampled: Tensor, advantages: Tensor, low: float, high: float, most: float
) -> Terms:
    """PPO's objective with GRPO's advantages, for tokens that a server sampled.

    -w min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(new - old). Two widths: DAPO's clip-higher (arXiv
    2503.14476), which lets an unlikely token grow. The caller divides by the tokens of all responses together, as DAPO
    does: GRPO's mean over each response first makes a token of a long one count less.

    The server's kernels, or its older weights, are not quite the policy that the step began with. What that does to
    expectations is undone by the importance weight w = exp(old - sampled), truncated at `most` so that no token decides
    alone; it is a constant, and the clip is about the policy's own move (arXiv 2505.24298, section 5.2).

    Args:
        new: log-probabilities under the policy that is trained.
        old: under the policy that the step began with, by the trainer's numerics.
        sampled: when the tokens were sampled, from the server.
    """
    ratio = (new - old).exp()
    free, held = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    weight = (old - sampled).exp()
    # the estimator k3 of joschu.net/blog/kl-approx.html: never negative, and its expectation is that of -log r
    moved = (new - sampled).detach()
    drift = moved.exp() - 1 - moved
    objective = -(weight.clamp(max=most) * free.minimum(held)).sum()
    return Terms(objective, (held < free).sum(), (weight > most).sum(), drift.sum())


def divergence(new: Tensor, start: Tensor) -> Tensor:
    """What GRPO punishes: an estimate of KL(new || start) in nats, summed over tokens (arXiv 2402.03300, equation 4).

    A token that the start thought far likelier makes it huge. So what is logged is the mean of new - start, which has
    the same expectation where the policy itself sampled.
    """
    back = start - new
    return (back.exp() - 1 - back).sum()
