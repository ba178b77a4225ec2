"""Responses to learn from, and how they are packed into forward passes."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = 0  # any token: causal attention never looks at what comes after, and no loss counts it


class Trajectory(NamedTuple):
    """A response with its prompt."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the response's tokens when they were sampled."""
    advantage: float

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


class Batch(NamedTuple):
    """B trajectories of at most T + 1 tokens; position t of the last three is about token t + 1."""

    tokens: Tensor
    """[B, T + 1] int64, padded behind."""
    old: Tensor
    """[B, T] float32; 0 where `counts` is false."""
    counts: Tensor
    """[B, T] bool: the token is of a response."""
    advantages: Tensor
    """[B] float32."""


def shares(trajectories: Sequence[Trajectory], parts: int, seed: str) -> list[list[Trajectory]]:
    """`parts` random shares of nearly one size, none of them empty unless there are fewer trajectories."""
    mixed = random.Random(seed).sample(trajectories, len(trajectories))
    return [mixed[part::parts] for part in range(min(parts, len(mixed)))]


def batches(trajectories: Sequence[Trajectory], limit: int, device: str) -> Iterator[Batch]:
    """All of them, those of similar lengths together, in batches of at most `limit` tokens (or of one trajectory)."""
    some: list[Trajectory] = []
    for trajectory in sorted(trajectories, key=lambda each: each.length):
        if some and (len(some) + 1) * trajectory.length > limit:
            yield _batch(some, device)
            some = []
        some.append(trajectory)
    if some:
        yield _batch(some, device)


def _batch(trajectories: Sequence[Trajectory], device: str) -> Batch:
    width = max(each.length for each in trajectories)
    tokens = torch.full((len(trajectories), width), PADDING)
    old = torch.zeros(len(trajectories), width - 1)
    counts = torch.zeros(len(trajectories), width - 1, dtype=torch.bool)
    for row, each in enumerate(trajectories):
        begin, end = len(each.prompt) - 1, each.length - 1
        tokens[row, : each.length] = torch.tensor(each.prompt + each.response)
        old[row, begin:end] = torch.tensor(each.logprobs)
        counts[row, begin:end] = True
    advantages = torch.tensor([each.advantage for each in trajectories])
    return Batch(*(part.to(device) for part in (tokens, old, counts, advantages)))
