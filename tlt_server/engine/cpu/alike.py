"""Passes that give a token the same bits whatever else they hold: `--enable-deterministic-inference` on a CPU.

A library rounds a product of few rows otherwise than one of many, and a sum over keys otherwise where others lie
between. Here products are of ROWS rows at a time. A query attends alone to the keys that it sees, in their order: by
blocks of KEYS, whose sums are added one after another, so that what is padded adds zeros at the end.

With names of SGLang's, for whose `batch_invariant_ops` it stands: that has no CPU build.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad, rms_norm

if TYPE_CHECKING:
    from tlt_server.engine.cpu.attention import Layout

ROWS, KEYS = 16, 64
_kernels: list[Any] = []


def enable_batch_invariant_mode() -> None:
    """From here on, in this process."""
    if _kernels:
        return
    library = torch.library.Library("aten", "IMPL")
    # override: as SGLang does on a GPU
    library.impl("mm", product, "CPU")
    library.impl("addmm", _sum_and_product, "CPU")
    _kernels.append(library)  # it holds them


def is_batch_invariant_mode_enabled() -> bool:
    """Whether this process is in the mode."""
    return bool(_kernels)


def rms_norm_batch_invariant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Of each row by itself, as a CPU has it anyway."""
    return rms_norm(x, x.shape[-1:], weight, eps)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of matrices: [m, k] and [k, n]."""
    rows = len(left)
    blocks = pad(left, (0, 0, 0, -rows % ROWS)).split(ROWS)
    # by bmm, whose kernel is not replaced
    return torch.cat([torch.bmm(block[None], right[None])[0] for block in blocks])[:rows] if rows else left @ right


def _sum_and_product(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return beta * bias + alpha * product(left, right)


def attend_alike(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: "Layout", scale: float
) -> torch.Tensor:
    """As `attention.attend`. Takes memory of ROWS queries at a time."""
    bs, n_q, heads, _ = query.shape
    slots = layout.slots.repeat_interleave(n_q, 0)
    masks = layout.mask[:, 0].flatten(0, 1)
    parts = zip(query.flatten(0, 1).split(ROWS), slots.split(ROWS), masks.split(ROWS), strict=True)
    attended = [_attended(scale * part, keys, values, *places) for part, *places in parts]
    return torch.cat(attended).view(bs, n_q, heads, -1)


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """query: [rows, heads, head_dim], scaled. slots, mask: [rows, n], each query's. To [rows, heads, value_dim]."""
    rows, heads, _ = query.shape
    seen = mask.sum(-1, keepdim=True)
    width = -(-int(seen.max()) // KEYS) * KEYS
    order = mask.byte().argsort(dim=-1, descending=True, stable=True)[:, :width]
    own = pad(slots.gather(1, order), (0, width - order.shape[1]))
    beyond = torch.arange(width) >= seen
    k, v = (_in_blocks(pool[own.masked_fill(beyond, 0)].to(query.dtype)) for pool in (keys, values))
    kv_heads, blocks = k.shape[1:3]
    q = query.view(rows, kv_heads, 1, heads // kv_heads, -1).expand(-1, -1, blocks, -1, -1)
    scores = q @ k.transpose(-1, -2)
    scores = scores.masked_fill(beyond.view(rows, 1, blocks, 1, KEYS), float("-inf"))
    weights = (scores - scores.amax((2, 4), keepdim=True)).exp()
    # cumsum adds one after another
    summed = (weights @ v).cumsum(2)[:, :, -1] / weights.sum(-1, keepdim=True).cumsum(2)[:, :, -1]
    return summed.reshape(rows, heads, -1)


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """[rows, width, heads, dim] to [rows, heads, blocks, KEYS, dim]; contiguous, or products would differ by layout."""
    return rows.unflatten(1, (-1, KEYS)).permute(0, 3, 1, 2, 4).contiguous()
