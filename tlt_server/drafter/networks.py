"""The networks of EAGLE and EAGLE-3, under the names and by the arithmetic with which SGLang 0.5.17 serves them.

EAGLE (arXiv 2401.15077) is one of the target's layers without its first norm, over the embedding and the target's final
hidden state. EAGLE-3 (arXiv 2503.01840) reads what three of the target's layers put out, with norms of its own, and may
have a head of its own over a part of the vocabulary. The embedding, and a head that is not its own, are the target's.

    SGLang's class            for                  biases
    LlamaForCausalLMEagle     Llama (and Qwen3)    query, key, value and output, if the config says `attention_bias`
    Qwen2ForCausalLMEagle     Qwen2                query, key and value
    LlamaForCausalLMEagle3    all                  output, if the config says `attention_bias`

None has Qwen3's norms of query and key. Shapes below: N rows, H hidden size, D head_dim.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_server.errors import ConfigError


class Rope:
    """Cosines and sines of positions, by a config's `rope_parameters`, or its `rope_theta` and `rope_scaling`. Raises
    ConfigError: a kind of scaling other than Llama 3.1's and YaRN."""

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = given.get("rope_type") or given.get("type") or "default"
        theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._scale = 1.0
        if kind == "llama3":
            frequencies = _slowed(frequencies, given)
        elif kind == "yarn":
            longest = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
            frequencies, self._scale = _interpolated(frequencies, given, theta, longest)
        elif kind != "default":
            raise ConfigError(f"rope_type {kind}: a drafter that can be trained has default, llama3 or yarn")
        self._frequencies = frequencies

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] -> cosines and sines, each [N, head_dim]; the two halves of a head rotate together."""
        angles = positions.float()[:, None] * self._frequencies.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [heads, N, head_dim], turned by each row's angles."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.to(x.dtype)


def _slowed(frequencies: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: waves longer than the old context turn `factor` times slower, short ones as before, a ramp between.
    Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (`apply_scaling`)."""
    turns = given["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / given["factor"])


def _interpolated(frequencies: Tensor, given: Mapping[str, Any], theta: float, longest: int) -> tuple[Tensor, float]:
    """YaRN's (arXiv 2309.00071, 3.1 to 3.3): waves that turn seldom in the old context turn `factor` times slower, a
    ramp over the pairs between; and what cosines and sines are multiplied with."""
    pairs, factor = len(frequencies), given["factor"]

    def pair_of(turns: float) -> float:
        return pairs * math.log(longest / (turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair_of(given.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_of(given.get("beta_slow") or 1)), 2 * pairs - 1)
    slowed = ((torch.arange(pairs) - low) / max(high - low, 1e-3)).clamp(0, 1)

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    scale = attention(one) / attention(all_dim) if one and all_dim else attention(1.0)
    return frequencies * (1 - slowed + slowed / factor), given.get("attention_factor") or scale


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotation: TypeAlias = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Grouped-query attention over rows [..., N, width]; what a row sees is `attend`'s, of [..., heads, N, D] each."""

    def __init__(self, config: Mapping[str, Any], width: int, *, bias: bool, out_bias: bool) -> None:
        super().__init__()
        heads, self.head_dim = config["num_attention_heads"], head_dim(config)
        shared = (config.get("num_key_value_heads") or heads) * self.head_dim
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, shared, bias=bias)
        self.v_proj = nn.Linear(width, shared, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config["hidden_size"], bias=out_bias)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(rotate(query, rotation), rotate(key, rotation), value)
        return self.o_proj(mixed.transpose(-3, -2).flatten(-2))


class Mlp(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def norm(config: Mapping[str, Any]) -> nn.RMSNorm:
    """Over a hidden state."""
    return nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])


class EagleLayer(nn.Module):
    """A target's layer without its first norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if config["architectures"][0] == "Qwen2ForCausalLMEagle":
            bias, out_bias = True, False
        else:
            bias = out_bias = bool(config.get("attention_bias"))
        self.self_attn = Attention(config, config["hidden_size"], bias=bias, out_bias=out_bias)
        self.post_attention_layernorm = norm(config)
        self.mlp = Mlp(config)


class Eagle(nn.Module):
    """EAGLE. Its state is what the head reads, and stands in for the target's final hidden state."""

    own_head = None
    draft_tokens: Tensor | None = None
    aux_layers: tuple[int, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.rope = Rope(config, head_dim(config))
        self.fc = nn.Linear(2 * config["hidden_size"], config["hidden_size"])
        self.layers = nn.ModuleList([EagleLayer(config)])

    def mix(self, states: Tensor) -> Tensor:
        """The target's states [N, H] as the first step reads them."""
        return states

    def step(self, embeds: Tensor, state: Tensor, rotation: Rotation, attend: Attend) -> tuple[Tensor, Tensor]:
        """embeds and state [N, H] -> what the head reads, and the state that the next step reads; here the same."""
        layer = self.layers[0]
        x = self.fc(torch.cat((embeds, state), dim=-1))
        x = x + layer.self_attn(x, rotation, attend)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, x


class Eagle3Layer(nn.Module):
    """Attention over embedding and state side by side, each with a norm of its own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = norm(config)
        self.hidden_norm = norm(config)
        self.self_attn = Attention(
            config, 2 * config["hidden_size"], bias=False, out_bias=bool(config.get("attention_bias"))
        )
        self.post_attention_layernorm = norm(config)
        self.mlp = Mlp(config)


class Eagle3(nn.Module):
    """EAGLE-3. With `draft_vocab_size` in its config it has a head of its own, over the tokens `draft_tokens`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.aux_layers = tuple((config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or (0, 1, 2))
        self.rope = Rope(config, head_dim(config))
        self.fc = nn.Linear(len(self.aux_layers) * config.get("target_hidden_size", hidden), hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = norm(config)
        reduced = config.get("draft_vocab_size")
        self.lm_head = nn.Linear(hidden, reduced, bias=False) if reduced else None
        # the checkpoint's: each draft token's id in the target, less its own; and which of the target's are drafted
        self.register_buffer("d2t", torch.zeros(reduced, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool) if reduced else None)

    @property
    def own_head(self) -> Tensor | None:
        """[V', H], or None where it is the target's."""
        return None if self.lm_head is None else self.lm_head.weight

    @property
    def draft_tokens(self) -> Tensor | None:
        """[V'] int64, ids of the tokens that the head is over; None for all."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def mix(self, states: Tensor) -> Tensor:
        """What three of the target's layers put out, side by side [N, 3 H], as the first step reads it."""
        mixed: Tensor = self.fc(states)
        return mixed

    def step(self, embeds: Tensor, state: Tensor, rotation: Rotation, attend: Attend) -> tuple[Tensor, Tensor]:
        """As `Eagle.step`; the head reads the state after a norm, the next step before it."""
        layer = self.layers[0]
        x = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(state)), dim=-1)
        x = state + layer.self_attn(x, rotation, attend)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), x
