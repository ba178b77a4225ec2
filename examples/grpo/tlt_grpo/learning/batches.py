"""Responses to learn from, and how they are packed into forward passes."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Trajectory(NamedTuple):
    """A response with its prompt."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the response's tokens when they were sampled."""
    advantage: float

    @property
    def length(self) -> int:
        """Tokens that a forward pass reads: nothing is asked behind the last one."""
        return len(self.prompt) + len(self.response) - 1


class Pack(NamedTuple):
    """Trajectories behind one another, without padding: T tokens, of which N are followed by a response's."""

    tokens: Tensor
    """[1, T] int64."""
    positions: Tensor
    """[1, T] int64, from 0 on in each trajectory."""
    lengths: tuple[int, ...]
    """Of the trajectories; they add up to T."""
    at: Tensor
    """[N] int64: where in T those tokens are."""
    following: Tensor
    """[N] int64: the response's tokens."""
    sampled: Tensor
    """[N] float32: their log-probabilities when they were sampled."""
    advantages: Tensor
    """[N] float32."""


def shares(trajectories: Sequence[Trajectory], parts: int, seed: str) -> list[list[Trajectory]]:
    """`parts` random shares of nearly one size, none of them empty unless there are fewer trajectories."""
    mixed = random.Random(seed).sample(trajectories, len(trajectories))
    return [mixed[part::parts] for part in range(min(parts, len(mixed)))]


def packs(trajectories: Sequence[Trajectory], limit: int, device: str) -> list[Pack]:
    """All of them, in packs of at most `limit` tokens (or of one trajectory): the longest first, each where it fits."""
    bins: list[list[Trajectory]] = []
    for trajectory in sorted(trajectories, key=lambda each: -each.length):
        fits = (some for some in bins if sum(each.length for each in some) + trajectory.length <= limit)
        some = next(fits, None)
        if some is None:
            bins.append([trajectory])
        else:
            some.append(trajectory)
    return [pack(some, device) for some in bins]


def pack(trajectories: Sequence[Trajectory], device: str) -> Pack:
    """One pack of them all, in their order."""
    lengths = [each.length for each in trajectories]
    read = [token for each in trajectories for token in (each.prompt + each.response)[:-1]]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    at = [
        place
        for start, each in zip(starts, trajectories, strict=True)
        for place in range(start + len(each.prompt) - 1, start + each.length)
    ]
    return Pack(
        tokens=torch.tensor([read]).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        lengths=tuple(lengths),
        at=torch.tensor(at).to(device),
        following=torch.tensor([token for each in trajectories for token in each.response]).to(device),
        sampled=torch.tensor([value for each in trajectories for value in each.logprobs]).to(device),
        advantages=torch.tensor([each.advantage for each in trajectories for _ in each.response]).to(device),
    )
