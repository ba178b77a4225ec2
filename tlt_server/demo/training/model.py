"""The demo's target: a Llama in plain torch whose parameters bear the names of a Hugging Face checkpoint.

Shapes below: B sequences, T tokens, H = `Shape.hidden`, D = `Shape.head_dim`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. GPU attention kernels want heads of 64."""

    vocab: int
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 768
    context: int = 2048
    eps: float = 1e-5
    rope_theta: float = 10000.0

    def rope(self, positions: Tensor) -> Rope:
        """Cosines and sines, each [T, D], of rotary embeddings that rotate halves (Su et al., arXiv 2104.09864)."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angles = positions.float()[:, None] * self.rope_theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.to(x.dtype)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each position to all up to it; query [B, heads, T, D], key and value [B, kv_heads, T, D]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention over inputs of `width` features; where the keys come from is the caller's `attend`."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(_rotate(query, rope), _rotate(key, rope), value)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer of the target."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything but the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)


class Target(nn.Module):
    """The language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        init_weights(self)

    def forward(self, tokens: Tensor, rope: Rope, attends: list[Attend] | None = None) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> final hidden states after the norm [B, T, H], and what each layer put out.

        `attends` has one attention per layer, for a cache; without it each position sees those before it in `tokens`.
        """
        x = self.model.embed_tokens(tokens)
        outputs = []
        for layer, attend in zip(self.model.layers, attends or [causal] * self.shape.layers, strict=True):
            x = layer(x, rope, attend)
            outputs.append(x)
        return self.model.norm(x), outputs


def init_weights(module: nn.Module) -> None:
    """Normal with deviation 0.02 for every matrix, zero for every bias; norms keep their ones."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
