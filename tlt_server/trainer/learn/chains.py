"""The unrolled pass: a chain of drafts from every entry of a pack at once, as if each earlier draft were accepted.

The first step reads the target's states, each later one the drafter's own, fed back, at the next entry of the same run:
what a server's drafter reads when it drafts (HASS's aligned passes, arXiv 2408.15766; EAGLE-3's training-time test,
arXiv 2503.01840).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.trainer.learn.attention import ChainAttention
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack


@dataclass(frozen=True)
class Frozen:
    """What a drafter shares with its target: embedding and head, [V, H] each. version: of the target."""

    embedding: Tensor
    head: Tensor
    version: int = 0

    def to(self, device: torch.device) -> "Frozen":
        return Frozen(self.embedding.to(device), self.head.to(device), self.version)


@dataclass(frozen=True)
class Step:
    """One step of N chains.

    reads: [N, H], what the head reads. at: [N] int64, the entry of the pack where each chain is now; it predicts the
    token after that entry's. counts: [N] bool, whether it does: not past the end of a run, nor from within a prompt.
    """

    reads: Tensor
    at: Tensor
    counts: Tensor


def autocast(device: torch.device) -> torch.autocast:
    """On a GPU matrices are multiplied in bfloat16, as the server does; on a CPU in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def draft(network: Network, frozen: Frozen, pack: Pack, steps: int) -> Iterator[Step]:
    """Each step of the chains in turn; `reads` at rows that do not count means nothing."""
    attend, state = ChainAttention(pack.attention(steps)), network.mix(pack.states.float())
    for step in range(steps):
        at, counts = pack.ahead(step)
        embeds = F.embedding(pack.tokens[at], frozen.embedding).float()
        reads, state = network.step(embeds, state, network.rope(pack.positions[at]), attend)
        yield Step(reads, at, counts)


def drafter_logits(network: Network, frozen: Frozen, reads: Tensor, head: Tensor | None = None) -> Tensor:
    """reads [..., H] -> the drafter's logits [..., V'] in float32, over its own vocabulary, or that of `head`."""
    if head is None:
        head = frozen.head if network.own_head is None else network.own_head
    return F.linear(reads.to(head.dtype), head).float()


def drafter_law(network: Network, frozen: Frozen, reads: Tensor, temperature: float = 1.0) -> Tensor:
    """reads [..., H] -> the drafter's probabilities [..., V] of all tokens; zero where it does not know a token."""
    law = _law(drafter_logits(network, frozen, reads), temperature)
    if network.draft_tokens is None:
        return law
    whole = law.new_zeros(*law.shape[:-1], len(frozen.head))
    return whole.index_copy(-1, network.draft_tokens, law)


def target_law(frozen: Frozen, finals: Tensor, temperature: float = 1.0) -> Tensor:
    """finals [..., H] -> the target's probabilities [..., V] in float32."""
    return _law(F.linear(finals.to(frozen.head.dtype), frozen.head).float(), temperature)


def _law(logits: Tensor, temperature: float) -> Tensor:
    """At temperature 1, which is the usual one, without reading and writing them once more for nothing."""
    return (logits if temperature == 1 else logits / temperature).softmax(-1)
