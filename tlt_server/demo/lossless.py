"""The losslessness check: does a server sample what its target says, speculation or not?

Sampled continuations of a few tokens are enumerated with their exact probabilities, by transformers, and compared by a
chi-squared test. Of whole responses it is asked whether their tokens are as surprising as the law says. Greedy output
is compared token for token.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

Tokens = tuple[int, ...]
NextProbs = Callable[[Sequence[Tokens]], torch.Tensor]
"""From n equally long token sequences to the law of what follows each, [n, vocab], float."""

REST: Tokens = ()
"""The outcome that stands for every continuation that was too rare to enumerate."""


def enumerate_law(next_probs: NextProbs, prompt: Tokens, length: int, rarest: float) -> dict[Tokens, float]:
    """The law of the first `length` tokens after a prompt.

    next_probs: the target, its temperature and filters applied. rarest: continuations less probable are not followed.
    Returns probability by continuation; what is missing from one stands under `REST`.
    """
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        rows = next_probs([prompt + continuation for continuation in law]).double()
        rows *= torch.tensor(list(law.values()), dtype=torch.float64)[:, None]
        stems = list(law)
        law = {stems[i] + (token,): float(rows[i, token]) for i, token in (rows >= rarest).nonzero().tolist()}
    return law | {REST: max(0.0, 1.0 - sum(law.values()))}


def p_value(observed: Iterable[Tokens], law: Mapping[Tokens, float]) -> float:
    """The probability that counts as far from the law as these, or farther, come from the law itself.

    Pearson's chi-squared test; outcomes expected fewer than five times are counted with `REST`, as the test asks.
    An outcome that the law does not hold at all counts with `REST` too; where `REST` has no probability, the answer
    is 0: the impossible was observed.
    """
    counts = Counter(each if each in law else REST for each in observed)
    total = sum(counts.values())
    common = [each for each in law if each != REST and law[each] * total >= 5]
    seen = [counts[each] for each in common]
    expected = [law[each] * total for each in common]
    rest_seen, rest_expected = total - sum(seen), total - sum(expected)
    if rest_expected >= 5:
        seen, expected = [*seen, rest_seen], [*expected, rest_expected]
    elif rest_seen and rest_expected < 1e-6 * total:
        return 0.0
    if len(expected) < 2:
        raise ValueError(
            f"{total} samples leave {len(expected)} outcomes to compare: sample more, or shorter continuations"
        )
    statistic = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def surprise_z(responses: Iterable[tuple[torch.Tensor, Tokens]]) -> float:
    """By how many standard deviations whole responses are more surprising, all together, than their law expects.

    A token's surprise is -log p, whose expectation is the law's entropy: the excess over all tokens is a martingale of
    known variance, wherever responses end. A server that keeps drafts which it should refuse is less surprising.

    responses: the logits before each token, [length, vocab], temperature and filters applied; and the tokens.
    Returns standard normal if the responses come from the law; infinite where a token is that the law excludes.
    Raises ValueError: each token was certain, or as likely as all others that are possible.
    """
    excess = variance = 0.0
    for logits, sampled in responses:
        log_probs = logits.double().log_softmax(-1)
        probs, surprises = log_probs.exp(), -log_probs.where(log_probs.isfinite(), 0.0)
        tokens = torch.tensor(sampled, device=logits.device)[:, None]
        if not probs.gather(1, tokens).all():
            return math.inf
        entropies = (probs * surprises).sum(-1, keepdim=True)
        variance += float((probs * (surprises - entropies) ** 2).sum())
        excess += float((surprises.gather(1, tokens) - entropies).sum())
    if variance < 1e-12:  # rounding
        raise ValueError(
            "no token could have been more surprising than another, which tells nothing: ask other prompts"
        )
    return excess / math.sqrt(variance)


def greedy_mismatches(left: Sequence[Tokens], right: Sequence[Tokens]) -> int:
    """How many responses differ in any token."""
    return sum(a != b for a, b in zip(left, right, strict=True))
