"""Rollouts at temperature 1 from the demo's target, thousands at a time; and the target's states of them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_server.demo.tokens import END_ID, PAD_ID
from tlt_server.demo.training.corpus import Sequence, collate
from tlt_server.demo.training.model import Target
from tlt_server.drafter.networks import Attend
from tlt_server.trainer.learn.packing import Run

# steps between two removals of finished sequences from the cache
COMPACT_EVERY = 32


@torch.no_grad()
def with_states(target: Target, aux_layers: tuple[int, ...], rollouts: list[Sequence]) -> list[Run]:
    """What a drafter learns from, on the target's device, all in one pass of the target. aux_layers: whose outputs the
    drafter reads side by side; none: it reads the final hidden states, as EAGLE does."""
    tokens = collate(rollouts, target.lm_head.weight.device).tokens
    finals, outputs = target(tokens, target.shape.rope(torch.arange(tokens.shape[1], device=tokens.device)))
    states = torch.cat([outputs[layer] for layer in aux_layers], dim=-1) if aux_layers else finals
    runs = []
    for row, one in enumerate(rollouts):
        kept = row, slice(len(one.tokens))
        runs.append(Run(tokens[kept], states[kept], finals[kept], prompt=one.prompt_length))
    return runs


class Cache:
    """Keys and values of every layer, [layers, B, kv_heads, max_length, D], filled one position at a time."""

    def __init__(self, target: Target, rows: int, max_length: int) -> None:
        shape, like = target.shape, target.lm_head.weight
        size = (shape.layers, rows, shape.kv_heads, max_length, shape.head_dim)
        self.keys, self.values = like.new_empty(size), like.new_empty(size)

    def attends(self, position: int) -> list[Attend]:
        """For each layer, attention of the token at `position` to all up to it, which it joins."""
        return [self._attend(layer, position) for layer in range(len(self.keys))]

    def _attend(self, layer: int, position: int) -> Attend:
        keys, values = self.keys[layer], self.values[layer]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[:, :, position], values[:, :, position] = key[:, :, 0], value[:, :, 0]
            # the heads that share a key are as many queries of one sequence: no copy of the cache
            grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
            mixed = F.scaled_dot_product_attention(grouped, keys[:, :, : position + 1], values[:, :, : position + 1])
            return mixed.flatten(1, 2)[:, :, None]

        return attend

    def keep(self, rows: Tensor) -> None:
        """Drop all but `rows`."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def sample(target: Target, prompts: list[list[int]], seed: int, max_length: int, rows: int = 8192) -> list[Sequence]:
    """One response for each prompt at temperature 1 and top_p 1, until the end token or `max_length` tokens in all."""
    generator = torch.Generator(target.lm_head.weight.device).manual_seed(seed)
    parts = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
    with torch.no_grad():
        return [sequence for part in parts for sequence in _sample(target, part, generator, max_length)]


def _sample(target: Target, prompts: list[list[int]], generator: torch.Generator, max_length: int) -> list[Sequence]:
    device = generator.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.full((len(prompts), max_length), PAD_ID, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    ropes = target.shape.rope(torch.arange(max_length, device=device))
    cache, alive = Cache(target, len(prompts), max_length), torch.arange(len(prompts), device=device)
    for position in range(max_length - 1):
        rope = (ropes[0][position, None], ropes[1][position, None])
        hidden, _ = target(tokens[alive, position, None], rope, cache.attends(position))
        drawn = torch.multinomial(target.lm_head(hidden[:, 0]).softmax(-1), 1, generator=generator)[:, 0]
        # every sequence starts at position 0, and those still inside their prompt take its next token
        drawn = torch.where(position + 1 < lengths[alive], tokens[alive, position + 1], drawn)
        tokens[alive, position + 1] = torch.where(tokens[alive, position] == END_ID, END_ID, drawn)
        if position % COMPACT_EVERY == COMPACT_EVERY - 1:
            running = (tokens[alive, position + 1] != END_ID).nonzero()[:, 0]
            cache.keep(running)
            alive = alive[running]
            if len(alive) == 0:
                break
    found = []
    for row, prompt in zip(tokens.cpu().numpy(), prompts, strict=True):
        ends = np.flatnonzero(row[len(prompt) :] == END_ID)
        length = len(prompt) + ends[0] + 1 if len(ends) else len(row)
        found.append(Sequence(row[:length].astype(np.int16), len(prompt)))
    return found
