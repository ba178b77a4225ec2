"""Rollouts at temperature 1 from the demo's target, thousands at a time; and the target's states of them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tlt_server.demo.tokens import END_ID, PAD_ID
from tlt_server.demo.training.corpus import Sequence, collate
from tlt_server.demo.training.model import Target
from tlt_server.drafter.networks import Attend
from tlt_server.trainer.learn.chains import autocast
from tlt_server.trainer.learn.packing import Run

# cuDNN's attention is left out: it plans for each length anew, which takes far longer than a step
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# steps between two removals of finished sequences from the cache
COMPACT_EVERY = 32
# positions that the cache has room for at first, a multiple of COMPACT_EVERY; doubled when most sequences have ended
FIRST_ROOM = 128


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
    """Keys and values of every layer, [layers, B, kv_heads, room, D], filled one position at a time."""

    def __init__(self, target: Target, rows: int, room: int) -> None:
        shape, device = target.shape, target.lm_head.weight.device
        size = (shape.layers, rows, shape.kv_heads, room, shape.head_dim)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # as `autocast` computes them
        self.keys, self.values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

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

    def keep(self, rows: Tensor, room: int) -> None:
        """Drop all but `rows`, and make room for more positions."""
        self.keys, self.values = (self._moved(each, rows, room) for each in (self.keys, self.values))

    def _moved(self, old: Tensor, rows: Tensor, room: int) -> Tensor:
        layers, _, kv_heads, width, head_dim = old.shape
        new = old.new_empty(layers, len(rows), kv_heads, max(room, width), head_dim)
        for layer in range(layers):  # one at a time, or all would be there three times
            new[layer, :, :, :width] = old[layer, rows]
        return new


def sample(target: Target, prompts: list[list[int]], seed: int, max_length: int, rows: int = 8192) -> list[Sequence]:
    """One response for each prompt at temperature 1 and top_p 1, until the end token or `max_length` tokens in all."""
    device = target.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    parts = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
    with torch.no_grad(), autocast(device), sdpa_kernel(KERNELS):
        return [sequence for part in parts for sequence in _sample(target, part, generator, max_length)]


def _sample(target: Target, prompts: list[list[int]], generator: torch.Generator, max_length: int) -> list[Sequence]:
    device = generator.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.full((len(prompts), max_length), PAD_ID, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    ropes = target.shape.rope(torch.arange(max_length, device=device))
    room, alive = min(FIRST_ROOM, max_length), torch.arange(len(prompts), device=device)
    cache = Cache(target, len(prompts), room)
    for position in range(max_length - 1):
        rope = (ropes[0][position, None], ropes[1][position, None])
        hidden, _ = target(tokens[alive, position, None], rope, cache.attends(position))
        law = target.lm_head(hidden[:, 0]).float().softmax(-1)
        drawn = torch.multinomial(law, 1, generator=generator)[:, 0]
        # every sequence starts at position 0, and those still inside their prompt take its next token
        drawn = torch.where(position + 1 < lengths[alive], tokens[alive, position + 1], drawn)
        tokens[alive, position + 1] = torch.where(tokens[alive, position] == END_ID, END_ID, drawn)
        if position % COMPACT_EVERY == COMPACT_EVERY - 1:
            running = (tokens[alive, position + 1] != END_ID).nonzero()[:, 0]
            room = min(2 * room, max_length) if position + 1 == room else room
            cache.keep(running, room)
            alive = alive[running]
            if len(alive) == 0:
                break
    found = []
    for row, prompt in zip(tokens.cpu().numpy(), prompts, strict=True):
        ends = np.flatnonzero(row[len(prompt) :] == END_ID)
        length = len(prompt) + ends[0] + 1 if len(ends) else len(row)
        found.append(Sequence(row[:length].astype(np.int16), len(prompt)))
    return found
