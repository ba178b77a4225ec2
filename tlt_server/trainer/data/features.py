"""Features as a server taps them, and the joining of pieces into runs.

Pieces of a sequence come in any order, overlap where a request was computed twice (retraction), and leave out what was
dropped on the way or came out of the radix cache. The prompt of a group of requests may come with one of them alone.
"""

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from tlt_server.trainer.learn.packing import Run

MOST_PIECES = 4096
"""Of one sequence: a message may bring thousands of a few bytes each."""

JOINED = 64
"""Pieces that become one: some hundreds of rows, so that a window of a response is joined of few."""


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

    @property
    def nbytes(self) -> int:
        parts = (self.tokens, self.states) if self.finals is self.states else (self.tokens, self.states, self.finals)
        return sum(part.nbytes for part in parts)

    def view(self, first: int, stop: int) -> "Piece":
        """What of it lies in the positions [first, stop), not copied."""
        if first <= self.first and self.stop <= stop:
            return self
        kept = slice(max(first - self.first, 0), max(stop - self.first, 0))
        states = self.states[kept]
        finals = states if self.finals is self.states else self.finals[kept]
        return Piece(max(first, self.first), self.tokens[kept], states, finals, self.version)

    def copy(self, first: int, stop: int) -> "Piece":
        """As `view`, in memory of its own."""
        return join([self.view(first, stop)])

    def contradicts(self, other: "Piece") -> bool:
        """Whether the two hold different tokens at one position."""
        first, stop = max(self.first, other.first), min(self.stop, other.stop)
        return first < stop and not torch.equal(self.view(first, stop).tokens, other.view(first, stop).tokens)


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece of several that follow on one another, copied; the version is the first one's."""
    names = (
        ("tokens", "states") if all(each.finals is each.states for each in pieces) else ("tokens", "states", "finals")
    )
    tokens, states, *finals = (torch.cat([getattr(each, name) for each in pieces]) for name in names)
    return Piece(pieces[0].first, tokens, states, finals[0] if finals else states, pieces[0].version)


class Track:
    """The rows held of one sequence, in order: of each position once, the newest version that came.

    A decode step brings a few rows of each request, so a long response comes in thousands of pieces: those that follow
    on one another are joined by the `JOINED`, each row copied once. nbytes, rows: of all. newest: version of the newest
    piece that came; -1: none is held.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._follow = 0  # of the last pieces, those that follow on the one before, and are not joined yet
        self.nbytes = self.rows = 0
        self.newest = -1

    def add(self, piece: Piece) -> str | None:
        """Takes a piece, or says why not."""
        held = self._pieces
        begin = bisect_right(held, piece.first, key=_stop)
        end = bisect_left(held, piece.stop, lo=begin, key=_first)
        over = held[begin:end]
        if any(other.contradicts(piece) for other in over):
            return "contradiction"
        if all(other.version >= piece.version for other in over) and _cover(over, piece):
            return "known"
        fresh = list(_merged(over, piece))
        if len(held) - len(over) + len(fresh) > MOST_PIECES:
            return "too many pieces"
        follows = begin == len(held) > 0 and held[-1].stop == piece.first and held[-1].version == piece.version
        held[begin:end] = fresh
        self._follow = self._follow + 1 if follows else 0
        if self._follow == JOINED:
            held[-JOINED:] = [join(held[-JOINED:])]
            self._follow = 0
        self._count(fresh, over)
        self.newest = max(self.newest, piece.version)
        return None

    def forget(self, oldest: int) -> None:
        """Lets go of what is of an older version."""
        gone = [each for each in self._pieces if each.version < oldest]
        if gone:
            self._pieces = [each for each in self._pieces if each.version >= oldest]
            self._follow = 0
            self._count((), gone)
            self.newest = self.newest if self._pieces else -1

    def within(self, first: int, stop: int, oldest: int) -> list[Piece]:
        """What is held of the positions [first, stop), of versions from `oldest` on; views."""
        begin = bisect_right(self._pieces, first, key=_stop)
        end = bisect_left(self._pieces, stop, lo=begin, key=_first)
        return [each.view(first, stop) for each in self._pieces[begin:end] if each.version >= oldest]

    def stretches(self, begin: int, end: int, oldest: int) -> list[tuple[int, int]]:
        """The positions of the rows [begin, end), counted in order, of versions from `oldest` on: [first, stop) of each
        stretch without a gap."""
        found: list[tuple[int, int]] = []
        before = 0
        for piece in self._pieces:
            rows = len(piece.tokens)
            first, stop = piece.first + max(begin - before, 0), piece.first + min(end - before, rows)
            before += rows
            if first >= stop or piece.version < oldest:
                continue
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, stop))
        return found

    def _count(self, more: Iterable[Piece], less: Iterable[Piece]) -> None:
        for sign, pieces in ((1, more), (-1, less)):
            for piece in pieces:
                self.nbytes += sign * piece.nbytes
                self.rows += sign * len(piece.tokens)


_first, _stop = attrgetter("first"), attrgetter("stop")


def _cover(pieces: Sequence[Piece], wanted: Piece) -> bool:
    """Whether all positions of `wanted` are in `pieces`, which are in order."""
    at = wanted.first
    for piece in pieces:
        if piece.first > at:
            return False
        at = piece.stop
    return at >= wanted.stop


def _merged(over: Sequence[Piece], piece: Piece) -> Iterator[Piece]:
    """A piece and those that it overlaps, in order, each position once and of its newest version; of two of the same
    version what was there stays."""
    at, tail = piece.first, None
    for other in over:
        if other.version >= piece.version:
            if at < other.first:
                yield piece.copy(at, other.first)
            yield other
            at = other.stop
            continue
        if other.first < piece.first:
            yield other.copy(other.first, piece.first)
        if other.stop > piece.stop:
            tail = other.copy(piece.stop, other.stop)
    if at < piece.stop:
        yield piece if at == piece.first else piece.copy(at, piece.stop)
    if tail is not None:
        yield tail


def assemble(pieces: Iterable[Piece], prompt: int) -> list[Run]:
    """The runs of consecutive positions that pieces, in order, cover. prompt: length of the sequence's prompt. A
    position alone makes no run."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and runs[-1][-1].stop == piece.first:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    whole = [join(parts) for parts in runs if sum(len(part.tokens) for part in parts) > 1]
    return [Run(each.tokens, each.states, each.finals, each.first, prompt) for each in whole]
