"""Where a prompt's responses said what a response says now, and how they went on.

Both forms do the same, to the bit: `CompiledIndex`, and `PlainIndex` for machines without a compiler and to hold the
other against. Neither draws, nor asks for the time: ranks that are told the same have the same.

A response's next tokens are looked for by its last 16 tokens, else 8, 4 or 2 (`LENGTHS`), among what was said to the
same prompt. The newest `VOTES` places vote, token by token, and who is outvoted is silent from there on.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

LENGTHS = (16, 8, 4, 2)
TAIL = LENGTHS[0]
PAGE = 32
"""Tokens that are forgotten together, all of one response."""
VOTES = 16
LEAST = 0.1
"""Of `Drafts.chances`, at which a draft ends."""
DEEPEST = 64
"""Tokens of a draft, at most."""
MATCHED = tuple(sorted(LENGTHS))
"""Tokens that match before a drafted one, those drafted before it among them, from which on it is in the next class."""
SHARES = (0.4, 0.6, 0.8, 0.99)
"""Of the votes that are left, likewise."""
CLASSES = len(MATCHED), len(SHARES) + 1
LOOKS = 5
NOTHING = -1
"""Stands before the first token of a prompt that has fewer than `TAIL`."""

Ints = NDArray[np.int32]
Numbers = Sequence[int] | NDArray[np.uint32]
"""Of responses."""


class Drafts(NamedTuple):
    """What n responses may say next.

    tokens: [n, most] int32, 0 from `lengths` on. chances: [n, most] float32, the share of votes that have agreed so
    far; of a few votes, hence far too sure. lengths: [n] int32. matched: [n] int32, of `LENGTHS`, or 0. versions: [n]
    uint32, of the weights that said the newest of what was found; 0 where nothing was.
    """

    tokens: Ints
    chances: NDArray[np.float32]
    lengths: Ints
    matched: Ints
    versions: NDArray[np.uint32]


class Judged(NamedTuple):
    """What came after lookups.

    tokens: of those that were looked for and had their turn, those before them having come: how many there were, and
        how many came, by class. [2, CLASSES] int64.
    looks: that are over, for a token was another one or all came, and had one before: how many, the sum of the tokens
        that the one before expected, of those that came, of the former's square, and of their product. [LOOKS] float64.
    """

    tokens: NDArray[np.int64]
    looks: NDArray[np.float64]


class History(Protocol):
    """An index of bounded size: what was written first is forgotten first, page by page.

    A response is a number of the caller's choice, best a small one, which it may take again once that response ended.
    capacity: tokens, a multiple of `PAGE`. A page that a response does not fill counts as a whole one.
    """

    capacity: int

    def clear(self) -> None:
        """Forgets all. Responses begin anew before they say more."""

    def begin(self, response: int, prompt: int, tail: Ints, version: int) -> None:
        """A response to a prompt: 64 bits that name it, and its last `TAIL` tokens, `NOTHING` before the first."""

    def stamp(self, responses: Numbers, version: int) -> None:
        """What they say from now on, other weights have said."""

    def add(self, responses: Numbers, counts: Sequence[int] | Ints, tokens: Ints) -> None:
        """What each of them said. tokens: [sum of counts], one response after another; or [responses, at least the
        largest count], of which a response has the first ones of a row."""

    def draft(self, responses: Numbers, most: int) -> Drafts:
        """Up to `most` tokens for each, `DEEPEST` at most."""

    def look(
        self, responses: Numbers, most: int, deepest: int, rates: NDArray[np.float64]
    ) -> tuple[Drafts, NDArray[np.float64]]:
        """As `draft`; and how likely it is that its first token comes, its first two, and so on, were it of up to
        `deepest` tokens: [responses, deepest], 0 beyond what was found. What comes next is judged by that, unless it
        is by an earlier look. rates: of each class, [CLASSES]; deepest: from `most` to `DEEPEST`."""

    def judged(self) -> Judged:
        """Since the last time."""

    @property
    def tokens(self) -> int:
        """That are kept."""

    @property
    def bytes(self) -> int:
        """Of memory that are reserved, which is what `capacity` takes."""


def tail_of(prompt: Sequence[int]) -> Ints:
    """The last `TAIL` tokens of a prompt: [TAIL] int32."""
    last = list(prompt[-TAIL:])
    return np.array([NOTHING] * (TAIL - len(last)) + last, dtype=np.int32)


def no_drafts(n: int, most: int) -> Drafts:
    """Of n responses that nothing is known to follow."""
    return Drafts(
        np.zeros((n, most), np.int32),
        np.zeros((n, most), np.float32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.uint32),
    )
