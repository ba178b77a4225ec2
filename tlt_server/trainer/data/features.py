"""Features as a server taps them, and the joining of pieces into runs.

Pieces of a sequence come in any order, overlap where a request was computed twice (retraction), and leave out what was
dropped on the way or came out of the radix cache. The prompt of a group of requests may come with one of them alone.
"""

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tlt_server.trainer.learn.packing import Run


@dataclass(frozen=True)
class Feature:
    """Consecutive tokens of one request with the target's states of them, all under one version of the target.

    request: its id; never that of another. group: the same for requests of the same prompt: an unsigned hash of its
    tokens, of 64 bits. prompt: length of the prompt. first: position of tokens[0]. tokens: [n] int. states: [n, W],
    what a drafter reads. finals: [n, H], the target's final hidden states; None where they are the states (EAGLE).
    """

    request: str
    group: int
    prompt: int
    first: int
    tokens: Tensor
    states: Tensor
    target_version: int
    finals: Tensor | None = None

    def is_held_out(self, share: float) -> bool:
        """Whether a hash of the prompt names the whole group to be kept from training; so it is for `share` of all."""
        return zlib.crc32(self.group.to_bytes(8, "little")) < share * 2**32


@dataclass(frozen=True)
class Piece:
    """A part of a feature, in memory of its own; the fields are the feature's."""

    first: int
    tokens: Tensor
    states: Tensor
    finals: Tensor
    version: int

    @classmethod
    def of(cls, feature: Feature, first: int, stop: int) -> "Piece":
        """The positions [first, stop) of a feature, copied: a view would keep alive what the whole came in."""
        kept = slice(first - feature.first, stop - feature.first)
        states = feature.states[kept].clone()
        finals = states if feature.finals is None else feature.finals[kept].clone()
        return cls(first, feature.tokens[kept].to(torch.int64, copy=True), states, finals, feature.target_version)

    @cached_property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    def overlaps(self, other: "Piece") -> bool:
        return self.first < other.stop and other.first < self.stop

    @property
    def nbytes(self) -> int:
        parts = (self.tokens, self.states) if self.finals is self.states else (self.tokens, self.states, self.finals)
        return sum(part.nbytes for part in parts)

    def covers(self, other: "Piece") -> bool:
        """Whether it holds all that the other does, under the same version of the target or a newer one."""
        return self.first <= other.first and other.stop <= self.stop and other.version <= self.version

    def contradicts(self, other: "Piece") -> bool:
        """Whether the two hold different tokens at one position."""
        first, stop = max(self.first, other.first), min(self.stop, other.stop)
        mine, others = (
            piece.tokens[max(first - piece.first, 0) : max(stop - piece.first, 0)] for piece in (self, other)
        )
        return first < stop and not torch.equal(mine, others)


def assemble(pieces: Iterable[Piece], prompt: int) -> list[Run]:
    """The runs of consecutive positions that the pieces of one sequence cover; the newest version of each position.
    prompt: length of the sequence's prompt. A position alone makes no run."""
    ordered = sorted(pieces, key=lambda piece: piece.version)
    ends = sorted({end for piece in ordered for end in (piece.first, piece.stop)})  # positions may be millions
    owner = torch.full((max(len(ends) - 1, 0),), -1)
    for index, piece in enumerate(ordered):
        owner[bisect_left(ends, piece.first) : bisect_left(ends, piece.stop)] = index
    runs: list[list[Piece]] = [[]]
    at = 0
    for index, count in zip(*(each.tolist() for each in owner.unique_consecutive(return_counts=True)), strict=True):
        if index < 0:
            runs.append([])
        else:
            runs[-1].append(_cut(ordered[index], ends[at], ends[at + count]))
        at += count
    return [_join(parts, prompt) for parts in runs if sum(len(part.tokens) for part in parts) > 1]


def _cut(piece: Piece, first: int, stop: int) -> Piece:
    kept = slice(first - piece.first, stop - piece.first)
    return Piece(first, piece.tokens[kept], piece.states[kept], piece.finals[kept], piece.version)


def _join(parts: Sequence[Piece], prompt: int) -> Run:
    tokens, states, finals = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "states", "finals")
    )
    return Run(tokens, states, finals, parts[0].first, prompt)
