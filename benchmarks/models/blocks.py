"""Weights in fp8 by blocks, as published checkpoints have them: float8_e4m3fn, and a float32 scale a block."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCK = 128
QUANTIZED = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
CONFIG = {"quantization_config": QUANTIZED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
"""What config.json says of them. Of Qwen2's own class, where a shape is written as Llama's else: SGLang's Llama drops
the scales."""


def in_blocks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's weights, the layers' matrices in fp8; embedding, head, norms and biases as they are."""
    for name, weight in weights:
        if not name.endswith("_proj.weight"):
            yield name, weight
            continue
        quantized, scale = quantize(weight)
        yield from ((name, quantized), (f"{name}_scale_inv", scale))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns], both whole blocks, to fp8, and [rows / BLOCK, columns / BLOCK] float32: each block's largest
    number becomes fp8's largest. Their product is the weight, to four bits."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(weight.shape), scale
