"""Penalties on a GPU, in one pass over the logits: penalties.py says what they are."""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["nodes", "depth"])  # else a request would wait for a compiler at each arm
def _penalise(
    logits: Any,
    counts: Any,
    factors: Any,
    rows: Any,
    paths: Any,
    stride: Any,
    vocab: Any,
    nodes: Any,
    depth: Any,
    block: tl.constexpr,
) -> None:
    node = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + node // nodes)
    if row > 0:
        token = tl.program_id(1) * block + tl.arange(0, block)
        inside = token < vocab
        count = tl.load(counts + row * vocab + token, mask=inside, other=0)
        for step in range(depth):
            count += (tl.load(paths + node * depth + step) == token).to(tl.int32)
        frequency, presence = tl.load(factors + 3 * row), tl.load(factors + 3 * row + 1)
        scaling = tl.where(count > 0, tl.load(factors + 3 * row + 2), 1.0)
        places = logits + node * stride + token
        logit = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        logit -= count * frequency + tl.where(count > 0, presence, 0.0)
        tl.store(places, tl.where(logit < 0, logit * scaling, tl.math.div_rn(logit, scaling)), mask=inside)


def penalise(
    logits: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor, rows: torch.Tensor, paths: torch.Tensor
) -> None:
    """As `penalties.penalise_on_cpu`, bit for bit: products are rounded before they are added."""
    nodes, (count, vocab) = len(logits) // len(rows), logits.shape
    grid = count, triton.cdiv(vocab, _BLOCK)
    _penalise[grid](
        logits,
        counts,
        factors,
        rows,
        paths.contiguous(),
        logits.stride(0),
        vocab,
        nodes,
        paths.shape[1],
        block=_BLOCK,
        enable_fp_fusion=False,
    )
