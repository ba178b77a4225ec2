"""Penalties on a GPU, in one pass over the logits: penalties.py says what they are."""

# mypy: disable-error-code="no-untyped-def"
# Triton gives kernels' arguments their types, call by call.

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

BLOCK = 1024
"""Tokens of a program. A row's programs that have nothing to do end at once."""


@triton.jit(do_not_specialize=["nodes", "depth"])  # else the first step of each arm would wait for a compiler
def _penalise_block(logits, counts, factors, rows, paths, nodes, depth, vocab, stride, BLOCK: tl.constexpr):
    node, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + node // nodes)
    if row > 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        count = tl.load(counts + row * vocab + token, mask=inside, other=0)
        for step in range(depth):
            count += (tl.load(paths + node * depth + step) == token).to(tl.int32)
        frequency, presence = tl.load(factors + 3 * row), tl.load(factors + 3 * row + 1)
        scaling = tl.where(count > 0, tl.load(factors + 3 * row + 2), 1.0)
        places = logits + node * stride + token
        logit = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        logit -= count.to(tl.float32) * frequency + tl.where(count > 0, presence, 0.0)
        # rounds as torch's division
        tl.store(places, tl.where(logit < 0, logit * scaling, tl.div_rn(logit, scaling)), mask=inside)


def penalise(
    logits: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor, rows: torch.Tensor, paths: torch.Tensor
) -> None:
    """As `penalties.penalise_on_cpu`, bit for bit: products are rounded before they are added. Logits may be rows of
    wider ones."""
    count, vocab = logits.shape
    _penalise_block[(count, triton.cdiv(vocab, BLOCK))](
        logits,
        counts,
        factors,
        rows,
        paths,
        count // len(rows),
        paths.shape[1],
        vocab,
        logits.stride(0),
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def compile_kernel(vocab: int, device: Any) -> None:
    """Now, or all requests wait for it with the first one that asks."""
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    counts, factors = torch.zeros(1, vocab, dtype=torch.int32, device=device), torch.zeros(1, 3, device=device)
    penalise(torch.zeros(1, vocab, device=device), counts, factors, nothing, nothing[:, None])
