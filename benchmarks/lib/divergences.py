"""Where two greedy responses part, and whether the target itself was undecided there.

bfloat16 keeps eight bits of a logit, and the order of sums depends on the batch, so that greedy decoding is not one
function of the prompt: where two tokens' logits are closer than rounding, either may win. A divergence is a tie if a
plain forward pass of the same weights in float32 finds the two logits within `TIE_ULPS` steps of bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference

# In bfloat16 the gap between the embedded target's two best logits is off by 0.7 steps (standard deviation, against
# float32, by transformers on a CPU), with rare errors of up to 5. Four are six standard deviations.
TIE_ULPS = 4.0


@dataclass(frozen=True)
class Divergence:
    """The first place where two responses differ.

    gap: between the two tokens' logits in float32.
    ulp: the step of bfloat16 at the larger of them.
    """

    gap: float
    ulp: float

    @property
    def in_ulps(self) -> float:
        return self.gap / self.ulp

    @property
    def tie(self) -> bool:
        return self.in_ulps <= TIE_ULPS


def first_difference(left: Tokens, right: Tokens) -> int | None:
    """The first index at which two responses differ, one that ends early included; None where they are the same."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def divergences(
    target: Reference, prompts: Sequence[Tokens], left: Sequence[Tokens], right: Sequence[Tokens]
) -> list[Divergence]:
    """Each pair of responses' first difference, re-scored by `target`; a failed request's empty one is passed over.

    Raises:
        ValueError: one response is the beginning of the other, which no greedy decoding does.
    """
    found = []
    for prompt, a, b in zip(prompts, left, right, strict=True):
        i = first_difference(a, b)
        if i is None or not a or not b:
            continue
        if i in (len(a), len(b)):
            raise ValueError(f"a response to {prompt} ended after {i} tokens, though it goes on in the other: {a}, {b}")
        logits = target.logits([prompt + a[:i]])[0]
        found.append(_between(float(logits[a[i]]), float(logits[b[i]])))
    return found


def _between(one: float, other: float) -> Divergence:
    largest = torch.tensor(max(abs(one), abs(other)))
    return Divergence(gap=abs(one - other), ulp=2.0 ** (int(largest.log2().floor()) - 7))


def divergence_figures(name: str, found: Sequence[Divergence]) -> dict[str, float | int]:
    return {
        f"greedy_divergences_{name}": len(found),
        f"greedy_non_ties_{name}": sum(not each.tie for each in found),
        f"greedy_largest_gap_ulps_{name}": max((each.in_ulps for each in found), default=0.0),
    }
