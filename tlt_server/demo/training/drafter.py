"""EAGLE and EAGLE-3 drafters, and the unrolled pass that trains and judges them.

A drafter reads, at index i of a sequence, the target's features of token i together with token i + 1, and predicts
token i + 2 (EAGLE, arXiv 2401.15077). Its first prediction rests on true features; the later ones of a chain rest on
its own states, fed back (HASS, arXiv 2408.15766; EAGLE-3, arXiv 2503.01840). Parameters bear the names that SGLang's
`LlamaForCausalLMEagle` and `LlamaForCausalLMEagle3` load. The embedding and the head are the target's and not stored.
"""

import torch
from torch import Tensor, nn

from tlt_server.demo.training.model import Attend, Attention, Mlp, Rope, Shape, Target, init_weights


class EagleLayer(nn.Module):
    """A target's layer without its first norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape)


class EagleDrafter(nn.Module):
    """EAGLE: one layer over the embedding and the target's final hidden state."""

    architecture = "LlamaForCausalLMEagle"

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        init_weights(self)

    def features(self, hidden: Tensor, outputs: list[Tensor]) -> Tensor:  # noqa: ARG002 - EAGLE-3 reads the outputs
        return hidden

    def step(self, embeds: Tensor, state: Tensor, rope: Rope, attend: Attend) -> tuple[Tensor, Tensor]:
        """embeds, state [B, T, H] -> what the head reads, and the state fed back; here they are one and the same."""
        layer = self.layers[0]
        x = self.fc(torch.cat((embeds, state), dim=-1))
        x = x + layer.self_attn(x, rope, attend)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, x


class Eagle3Layer(nn.Module):
    """Attention over embedding and state side by side, each with a norm of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape)


class Eagle3Drafter(nn.Module):
    """EAGLE-3: one layer over the embedding and a mixture of what three of the target's layers put out."""

    architecture = "LlamaForCausalLMEagle3"
    aux_layers = (0, 1, 2)

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(len(self.aux_layers) * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        init_weights(self)

    def features(self, hidden: Tensor, outputs: list[Tensor]) -> Tensor:  # noqa: ARG002 - EAGLE reads the hidden state
        mixed: Tensor = self.fc(torch.cat([outputs[layer] for layer in self.aux_layers], dim=-1))
        return mixed

    def step(self, embeds: Tensor, state: Tensor, rope: Rope, attend: Attend) -> tuple[Tensor, Tensor]:
        """As `EagleDrafter.step`; the head reads the state after a norm, the next step before it."""
        layer = self.layers[0]
        x = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(state)), dim=-1)
        x = state + layer.self_attn(x, rope, attend)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), x


Drafter = EagleDrafter | Eagle3Drafter


def draft_chains(target: Target, drafter: Drafter, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Draft a chain of `steps` tokens from every index at once, as if each earlier draft had been accepted.

    tokens [B, T], features [B, T, H] of the same tokens. Returns for each step k what the head reads [B, T - 1, H]; its
    index i predicts token i + 2 by a chain begun at index i - k, so that the first k indices mean nothing.
    """
    embeds, state = target.model.embed_tokens(tokens[:, 1:]), features[:, :-1]
    rope = target.shape.rope(torch.arange(tokens.shape[1] - 1, device=tokens.device))
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        return chain_attention(query, keys, values)

    heads = []
    for _ in range(steps):
        head, following = drafter.step(embeds, state, rope, attend)
        heads.append(head)
        state = _shift(following, 1, dim=1)
    return heads


def chain_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention in the last of several drafting steps; all tensors [B, heads, T, D], keys and values one per step.

    With k steps before it, index i sees true features up to i - k, and of step m (1 to k) the index i - k + m alone:
    the drafts of its own chain.
    """
    before, scale = len(keys) - 1, query.shape[-1] ** -0.5
    length = query.shape[2]
    scores = query @ keys[0].transpose(-1, -2) * scale
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril(-before)
    scores = scores.masked_fill(~visible, -torch.inf)
    aligned = [_shift(key, before - m, dim=2) for m, key in enumerate(keys) if m > 0]
    own = [(query * key).sum(-1, keepdim=True) * scale for key in aligned]
    weights = torch.cat((scores, *own), dim=-1).float().softmax(-1).to(query.dtype)
    mixed = weights[..., :length] @ values[0]
    for m, value in enumerate(values[1:], start=1):
        mixed = mixed + weights[..., length + m - 1, None] * _shift(value, before - m, dim=2)
    return mixed


def _shift(x: Tensor, by: int, dim: int) -> Tensor:
    """Move every index of `dim` up by `by`, zeros coming in."""
    if by == 0:
        return x
    head = torch.zeros_like(x.narrow(dim, 0, by))
    return torch.cat((head, x.narrow(dim, 0, x.shape[dim] - by)), dim=dim)
