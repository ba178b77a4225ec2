"""The demo's target: a Llama in plain torch whose parameters bear the names of a Hugging Face checkpoint.

Shapes: B sequences, T tokens, H = `Shape.hidden`, D = `Shape.head_dim`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from tlt_server.drafter.networks import Attend, EagleLayer, Rope, Rotation, norm
from tlt_server.trainer.learn.attention import causal


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

    def config(self) -> dict[str, Any]:
        """As config.json of a Llama has it."""
        sizes = {name: getattr(self, field) for field, name in _NAMES.items()}
        kept = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **kept, "dtype": "bfloat16"}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        return cls(**{field: config[name] for field, name in _NAMES.items()})

    def rope(self, positions: Tensor) -> Rotation:
        """Cosines and sines, each [T, D]."""
        return Rope({"rope_theta": self.rope_theta}, self.head_dim)(positions)


_NAMES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "context": "max_position_embeddings",
    "eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}


class Block(EagleLayer):
    """One layer of the target: an EAGLE drafter's, with the first norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.input_layernorm = norm(config)

    def forward(self, x: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything but the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = shape.config()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(shape.layers))
        self.norm = norm(config)


class Target(nn.Module):
    """The language model; matrices begin normal with deviation 0.02."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(
        self, tokens: Tensor, rope: Rotation, attends: list[Attend] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> final hidden states after the norm [B, T, H], and what each layer put out. `attends` has one
        attention per layer, for a cache; without it each position sees those before it in `tokens`."""
        x = self.model.embed_tokens(tokens)
        outputs = []
        for layer, attend in zip(self.model.layers, attends or [causal] * self.shape.layers, strict=True):
            x = layer(x, rope, attend)
            outputs.append(x)
        return self.model.norm(x), outputs
