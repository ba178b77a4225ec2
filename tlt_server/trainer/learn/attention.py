"""Attention of drafting chains over packed sequences: none of it crosses a sequence's border.

Every row of a pack starts a chain of its own. Its query in step k sees the target's features up to its own row (causal
attention to the keys of step 0: a `Base`), and of the steps 1 to k its own row alone. With L, the base's log-sum-exp,
the two are joined exactly:

    o = (e^L o_base + sum_m e^(s_m) v_m) / (e^L + sum_m e^(s_m))

Below, heads come first: query [Q, N, D], key and value [K, N, D] for N rows, where Q / K query heads share a key head.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Base: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""query, key, value -> what is mixed [Q, N, D], and the log-sum-exp of the scores [Q, N] in float32."""


QUERIES = 1024
"""Of a sequence, at a time."""


def by_sequence(bounds: Sequence[tuple[int, int]]) -> Base:
    """One sequence after another, in plain torch: for a CPU, and the reference for `flex`. bounds: first row, and the
    row after the last, of each sequence; together all rows, in order."""

    def base(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        parts = [_causal(*(x[:, first:stop] for x in (query, key, value))) for first, stop in bounds]
        mixed, denominators = zip(*parts, strict=True)
        return torch.cat(mixed, dim=1), torch.cat(denominators, dim=1)

    return base


def by_sequence_one_step(bounds: Sequence[tuple[int, int]]) -> Base:
    """As `by_sequence`, by torch's own kernel, for chains of one step: without the denominators (empty), which only
    later steps need."""

    def base(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        parts = [causal(*(x[None, :, first:stop] for x in (query, key, value))) for first, stop in bounds]
        return torch.cat(parts, dim=2)[0], query.new_empty(0)

    return base


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each position to all up to it; query [B, Q, N, D], key and value [B, K, N, D]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """In blocks of queries: the scores of a long sequence with itself would not fit into memory."""
    parts = []
    for first in range(0, query.shape[1], QUERIES):
        stop = first + QUERIES
        parts.append(_causal_block(query[:, first:stop], key[:, :stop], value[:, :stop], first))
    mixed, denominators = zip(*parts, strict=True)
    return torch.cat(mixed, dim=1), torch.cat(denominators, dim=1)


def _causal_block(query: Tensor, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of the queries from position `first` on, to keys up to the last of them."""
    length, dim = query.shape[1:]
    grouped = query.unflatten(0, (len(key), -1))
    scores = (grouped @ key[:, None].transpose(-1, -2)).float() * dim**-0.5
    hidden = torch.ones(length, key.shape[1], dtype=torch.bool, device=query.device).triu(1 + first)
    scores = scores.masked_fill(hidden, -torch.inf)
    denominators = scores.logsumexp(-1)
    weights = (scores - denominators[..., None]).exp().to(value.dtype)
    return (weights @ value[:, None]).flatten(0, 1), denominators.flatten(0, 1)


def flex(sequence: Tensor) -> Base:
    """One kernel over all rows, which skips the blocks that lie between sequences (FlexAttention, arXiv 2412.05496).

    For a GPU: torch has no backward pass of it on a CPU. sequence: [N] int, which of the packed sequences a row is of.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sequence[query] == sequence[key]) & (key <= query)

    mask = create_block_mask(visible, None, None, len(sequence), len(sequence), device=str(sequence.device))

    def base(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        mixed, extra = _flex_kernel()(
            query[None], key[None], value[None], block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return mixed[0], extra.lse[0]

    return base


@cache
def _flex_kernel() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


class ChainAttention:
    """Attention in one step of all chains after another; called once for each step, in order."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What each row's query sees: [Q, N, D]."""
        self._keys.append(key)
        self._values.append(value)
        mixed, denominator = self._base(query, self._keys[0], self._values[0])
        if len(self._keys) == 1:
            return mixed
        sharing, scale = len(query) // len(key), query.shape[-1] ** -0.5
        own = [(query * each.repeat_interleave(sharing, 0)).float().sum(-1) * scale for each in self._keys[1:]]
        weights = torch.stack([denominator, *own]).softmax(0).to(value.dtype)[..., None]
        mixed = weights[0] * mixed
        for weight, each in zip(weights[1:], self._values[1:], strict=True):
            mixed = mixed + weight * each.repeat_interleave(sharing, 0)
        return mixed
