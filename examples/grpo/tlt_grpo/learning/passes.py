"""Forward passes that cost what their tokens cost: attention within each sequence of a pack, and the head in parts.

Logits are the largest tensor of training: 8,192 tokens of a vocabulary of 152,064 are 5 GB in float32, several times
over with gradients. So the head is computed for some rows at a time, and again in the backward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from tlt_server.engine.cpu.torchvision import mend_torchvision
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tlt_grpo.errors import GrpoError
from tlt_grpo.learning.batches import Pack

NAME = "tlt_packed"
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which is compiled for each length: a step has as many as it has responses, each of them new."""


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    lengths: tuple[int, ...],
    **asked: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. query: [1, heads, T, d]; key, value with fewer heads; [1, T, heads, d]."""
    if unknown := [name for name in ("sliding_window", "softcap", "s_aux") if asked.get(name) is not None]:
        raise GrpoError(f"{type(module).__name__} wants {unknown[0]} of attention, which packed sequences do not have")
    scale = asked["scaling"]
    with sdpa_kernel(BACKENDS):
        parts = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            for q, k, v in zip(*(each.split(lengths, 2) for each in (query, key, value)), strict=True)
        ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def packed_attention() -> str:
    """What a model of transformers is loaded with, as its `attn_implementation`."""
    mend_torchvision()
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    return NAME


def pack_logprobs(model: Any, pack: Pack, temperature: float, rows: int) -> Tensor:
    """Log-probabilities [N] float32 of a pack's responses, with gradient.

    Args:
        model: a causal language model of transformers that was loaded with `packed_attention`.
        rows: of logits in memory at a time.
    """
    read = model.base_model(
        input_ids=pack.tokens, position_ids=pack.positions, lengths=pack.lengths, use_cache=False
    ).last_hidden_state
    return head_logprobs(read[0, pack.at], model.get_output_embeddings(), pack.following, temperature, rows)


def head_logprobs(states: Tensor, head: torch.nn.Module, tokens: Tensor, temperature: float, rows: int) -> Tensor:
    """Log-probabilities [N] float32 of tokens [N] by states [N, H] in front of the head."""
    parts = zip(states.split(rows), tokens.split(rows), strict=True)
    return torch.cat([checkpoint(_some, *part, head, temperature, use_reentrant=False) for part in parts])


def _some(states: Tensor, tokens: Tensor, head: torch.nn.Module, temperature: float) -> Tensor:
    logits = head(states).float() / temperature
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
