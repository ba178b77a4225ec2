"""Where two greedy responses part, and whether the target itself was undecided there.

bfloat16 keeps eight bits of a logit, and the order of sums depends on the batch, so that greedy decoding is not one
function of the prompt: where two tokens' logits are closer than rounding, either may win. A divergence is a tie if a
plain forward pass of the same weights in float32 finds the two logits within `TIE_ULPS` steps of bfloat16; or not
farther from each other than `TIE_ROUNDINGS` times what plain passes in bfloat16 are off there: where a response goes on
past its end, as streams of one length do, the target knows nothing, and rounding may move its logits by ten steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference

# In bfloat16 the gap between the embedded target's two best logits is off by 0.7 steps (standard deviation, against
# float32, by transformers on a CPU), with rare errors of up to 5. Four are six standard deviations.
TIE_ULPS = 4.0
# Two passes know by and large how far others are off: hardly ever is another one off by four times as much as both.
TIE_ROUNDINGS = 4.0
PARTS = 4
"""Tokens that the second of the plain passes in bfloat16 reads at once."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two responses differ.

    gap: between the two tokens' logits in float32.
    ulp: the step of bfloat16 at the larger of them.
    rounding: how far plain passes in bfloat16 are off in the gap, at most; 0 where that was not asked.
    """

    gap: float
    ulp: float
    rounding: float = 0.0

    @property
    def in_ulps(self) -> float:
        return self.gap / self.ulp

    @property
    def tie(self) -> bool:
        return self.gap <= max(TIE_ULPS * self.ulp, TIE_ROUNDINGS * self.rounding)


def first_difference(left: Tokens, right: Tokens) -> int | None:
    """The first index at which two responses differ, one that ends early included; None where they are the same."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def divergences(
    target: Reference, prompts: Sequence[Tokens], left: Sequence[Tokens], right: Sequence[Tokens]
) -> list[Divergence]:
    """Each pair of responses' first difference, re-scored by `target`, in float32, and where that finds no tie by its
    weights in bfloat16; a failed request's empty one is passed over.

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
        read = prompt + a[:i]
        one, other = target.logits([read])[0][[a[i], b[i]]].tolist()
        divergence = _between(one, other)
        if not divergence.tie:
            passes = target.rounded.logits([read])[0], target.rounded.logits_in_parts(read, PARTS)
            off = [abs(float(logits[a[i]] - logits[b[i]]) - (one - other)) for logits in passes]
            divergence = replace(divergence, rounding=max(off))
        found.append(divergence)
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
