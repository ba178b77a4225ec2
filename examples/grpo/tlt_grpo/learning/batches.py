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
    ages: tuple[int, ...] = ()
    """Of the tokens: publications since the weights that sampled them; none: all are of the newest."""

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
    """[N] float32; 0 of tokens that are too old to learn from."""
    fresh: Tensor
    """[N] bool: of a response that the newest weights sampled, all of it. Behind tokens of older ones a server reads
    what it has cached of those, so that its probabilities are not quite the newest weights'."""


def shares(trajectories: Sequence[Trajectory], parts: int, seed: str) -> list[list[Trajectory]]:
    """`parts` random shares of nearly one size, none of them empty unless there are fewer trajectories."""
    mixed = random.Random(seed).sample(trajectories, len(trajectories))
    return [mixed[part::parts] for part in range(min(parts, len(mixed)))]


def packs(trajectories: Sequence[Trajectory], limit: int, device: str, max_age: int = 0) -> list[Pack]:
    """All of them, in packs of at most `limit` tokens (or of one trajectory): the longest first, each where it fits."""
    bins: list[list[Trajectory]] = []
    for trajectory in sorted(trajectories, key=lambda each: -each.length):
        fits = (some for some in bins if sum(each.length for each in some) + trajectory.length <= limit)
        some = next(fits, None)
        if some is None:
            bins.append([trajectory])
        else:
            some.append(trajectory)
    return [pack(some, device, max_age) for some in bins]


def pack(trajectories: Sequence[Trajectory], device: str, max_age: int = 0) -> Pack:
    """One pack of them all, in their order. max_age: of tokens to learn from."""
    lengths = [each.length for each in trajectories]
    read = [token for each in trajectories for token in (each.prompt + each.response)[:-1]]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    at = [
        place
        for start, each in zip(starts, trajectories, strict=True)
        for place in range(start + len(each.prompt) - 1, start + each.length)
    ]
    advantages = [
        each.advantage if age <= max_age else 0.0
        for each in trajectories
        for age in each.ages or (0,) * len(each.response)
    ]
    return Pack(
        tokens=torch.tensor([read]).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        lengths=tuple(lengths),
        at=torch.tensor(at).to(device),
        following=torch.tensor([token for each in trajectories for token in each.response]).to(device),
        sampled=torch.tensor([value for each in trajectories for value in each.logprobs]).to(device),
        advantages=torch.tensor(advantages).to(device),
        fresh=torch.tensor([not any(each.ages) for each in trajectories for _ in each.response]).to(device),
    )
