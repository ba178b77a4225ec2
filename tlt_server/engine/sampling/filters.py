"""Probability filters: what may be sampled after a token, on any device. One law, for plain and speculative decoding.

A token stays if, all at once,
    top-k   fewer than top_k tokens are strictly more probable,
    top-p   the mass of the strictly more probable tokens is below top_p (top_p >= 1: always),
    min-p   it is at least min_p times as probable as the most probable one;
what stays is scaled to sum to one. All three look at the unfiltered row, so their order does not matter, but filtering
twice is not filtering once.

Tokens of equal probability stay or go together, but for top_k = 1, which is greedy decoding and keeps `argmax` alone,
the lowest of equals: greedy requests may ride in a batch that samples.

This is the law of SGLang's plain decoding on a GPU (flashinfer's `filter_apply_order="joint"`), which its other paths
depart from.
"""

from collections.abc import Collection, Sequence

import torch
from torch.nn.functional import pad

FIRST_RANKS = 64
"""How many ranks a CPU looks at first: finding them costs a tenth of sorting a vocabulary, and they mostly suffice."""


def _within_ranks(probs: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None) -> torch.Tensor:
    """What top-k and top-p keep: [rows, vocab] bool."""
    if not probs.is_cuda:
        return probs >= _rank_floor(probs, top_ks, top_ps)
    # These kernels count instead of sorting: nobody waits for the GPU, and equals stay or go together.
    import sgl_kernel

    stays = torch.ones_like(probs, dtype=torch.bool)
    if top_ks is not None:
        stays &= sgl_kernel.top_k_renorm_prob(probs, top_ks) > 0
    if top_ps is not None:
        stays &= sgl_kernel.top_p_renorm_prob(probs, top_ps) > 0
    return stays


def _rank_floor(probs: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None) -> torch.Tensor:
    """The smallest probability that top-k and top-p keep: [rows, 1].

    Judged by rank. Of a run of equals the first has before it just what is strictly more probable, so the run stays if
    the first one does; where the others' ranks fail them, the floor lets them in.
    """
    vocab = probs.shape[-1]
    width = min(FIRST_RANKS, vocab)
    while True:
        ordered = probs.topk(width).values if width < vocab else probs.sort(-1, descending=True).values
        stays = torch.ones_like(ordered, dtype=torch.bool)
        if top_ks is not None:
            stays &= torch.arange(width, device=probs.device) < top_ks[:, None]
        if top_ps is not None:
            mass_before = pad(ordered.cumsum(-1)[:, :-1], (1, 0))
            stays &= (mass_before < top_ps[:, None]) | (top_ps >= 1)[:, None]
        if width == vocab or not stays[:, -1].any():
            break
        width = min(8 * width, vocab)
    last = stays.sum(-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last)


def filter_probs(
    probs: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of `probs` under the module's law, as a new tensor.

    probs:  [rows, vocab] float32, rows sum to one
    top_ks: [rows] int, at least 1; 1 << 30, or anything above vocab, keeps all
    top_ps: [rows] float in (0, 1]
    min_ps: [rows] float in [0, 1]
    None says that every row has the neutral value: it saves the sort, and the wait for a GPU's answer that looking at
    the values would take. With None for all three, `probs` itself is returned.
    """
    if top_ks is None and top_ps is None and min_ps is None:
        return probs
    largest, argmax = probs.max(-1, keepdim=True)
    stays = torch.ones_like(probs, dtype=torch.bool)
    if top_ks is not None or top_ps is not None:
        stays &= _within_ranks(probs, top_ks, top_ps)
    if min_ps is not None:
        stays &= probs >= largest * min_ps[:, None]
    if top_ks is not None:
        stays &= (top_ks > 1)[:, None]
        stays.scatter_(1, argmax, True)
    kept = probs.masked_fill(~stays, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def compile_filters(device: str) -> None:
    """A GPU's kernels are compiled on their first use: now, or all requests wait a minute for the first with top_p."""
    even = torch.full((1, 1024), 1 / 1024, device=device)
    filter_probs(even, top_ks=torch.ones(1, dtype=torch.int32, device=device), top_ps=torch.ones(1, device=device))


def stop_token_table(stop_token_ids: Sequence[Collection[int]]) -> torch.Tensor:
    """Each request's stop tokens as a row of [bs, most of any request] int64, -1 where a request has fewer."""
    width = max(map(len, stop_token_ids), default=0)
    return torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in stop_token_ids], dtype=torch.int64)


def apply_min_new_tokens(
    logits: torch.Tensor, output_lens: torch.Tensor, min_new_tokens: torch.Tensor, stop_tokens: torch.Tensor
) -> None:
    """Forbid stop tokens after the nodes that come too early, in place.

    Plain decoding forbids them while a response has fewer than min_new_tokens tokens. A tree's nodes end responses of
    different lengths, so that each node has its own answer; upstream gives all of them the root's, which forbids stop
    tokens in places where plain decoding may sample them.

    logits:         [bs * nodes, vocab], contiguous; -inf is added where a stop token is too early
    output_lens:    [bs, nodes] int: response tokens up to and including the node, that is, its position in the sequence
                    + 1 - the prompt's length (in plain decoding: nodes = 1)
    min_new_tokens: [bs] int
    stop_tokens:    [bs, n] int64, as `stop_token_table` makes it
    """
    bs, nodes = output_lens.shape
    forbidden = (output_lens < min_new_tokens[:, None])[:, :, None] & (stop_tokens >= 0)[:, None, :]
    penalty = torch.zeros_like(forbidden, dtype=logits.dtype).masked_fill(forbidden, float("-inf"))
    # Added, not assigned: padding points at token 0, which may be somebody's stop token.
    index = stop_tokens.clamp(min=0)[:, None, :].expand(bs, nodes, -1)
    logits.view(bs, nodes, -1).scatter_add_(2, index, penalty)
