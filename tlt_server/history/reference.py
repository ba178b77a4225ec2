"""The index in plain Python."""

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_server.history.index import (
    CLASSES,
    DEEPEST,
    LEAST,
    LENGTHS,
    LOOKS,
    MATCHED,
    PAGE,
    SHARES,
    VOTES,
    Drafts,
    Ints,
    Judged,
    Numbers,
    no_drafts,
)

Context = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class Page:
    """tokens: what was before it, then its own."""

    prompt: int
    version: int
    tokens: list[int]
    before: int
    next: "Page | None" = None
    kept: bool = True

    @property
    def used(self) -> int:
        return len(self.tokens) - self.before


@dataclass(eq=False)
class Response:
    """looked: of what is judged, what did not come yet, with the class of each token; right: how many came; hoped: how
    many the look before hoped for, newest: and the newest; below 0 there was none."""

    prompt: int
    version: int
    tail: list[int]
    page: Page | None = None
    looked: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    right: int = 0
    hoped: float = -1.0
    newest: float = -1.0


Place = tuple[Page, int]
"""A page, and the number of tokens in it up to and with the place's own."""


@dataclass(eq=False)
class PlainIndex:
    """`History`, some fifty times slower and larger than the compiled one."""

    capacity: int
    _pages: deque[Page] = field(default_factory=deque)
    _places: dict[Context, deque[Place]] = field(default_factory=lambda: defaultdict(deque))
    _responses: dict[int, Response] = field(default_factory=dict)
    _judged: Judged = field(default_factory=lambda: Judged(np.zeros((2, *CLASSES), np.int64), np.zeros(LOOKS)))

    def clear(self) -> None:
        while self._pages:
            self._forget(self._pages.popleft())
        self._responses.clear()

    def begin(self, response: int, prompt: int, tail: Ints, version: int) -> None:
        self._responses[response] = Response(prompt, version, tail.tolist())

    def stamp(self, responses: Numbers, version: int) -> None:
        for number in responses:
            self._responses[int(number)].version = version

    def add(self, responses: Numbers, counts: Sequence[int] | Ints, tokens: Ints) -> None:
        starts = np.cumsum([0, *counts])[:-1] if tokens.ndim == 1 else np.arange(len(responses)) * tokens.shape[1]
        for number, count, start in zip(responses, counts, starts, strict=True):
            for token in tokens.ravel()[start : start + count].tolist():
                self._add(self._responses[int(number)], token)

    def _add(self, response: Response, token: int) -> None:
        self._judge(response, token)
        page = response.page
        if page is None or not page.kept or page.used == PAGE or page.version != response.version:
            page = self._turn(response)
        page.tokens.append(token)
        response.tail = [*response.tail[1:], token]
        for context in contexts(response.prompt, response.tail):
            self._places[context].append((page, len(page.tokens)))

    def _turn(self, response: Response) -> Page:
        if len(self._pages) == self.capacity // PAGE:
            self._forget(self._pages.popleft())
        page = Page(response.prompt, response.version, list(response.tail), len(response.tail))
        if response.page is not None and response.page.kept:
            response.page.next = page
        response.page = page
        self._pages.append(page)
        return page

    def _forget(self, page: Page) -> None:
        page.kept, page.next = False, None
        for end in range(page.before + 1, len(page.tokens) + 1):
            for context in contexts(page.prompt, page.tokens[:end]):
                self._unlink(context, (page, end))

    def _unlink(self, context: Context, place: Place) -> None:
        """Forgets a place and, as chains do, those before it."""
        places = self._places.get(context, deque())
        if place not in places:
            return
        while places.popleft() != place:
            pass
        if not places:
            del self._places[context]

    def _judge(self, response: Response, token: int) -> None:
        if response.looked:
            (expected, its_class), *rest = response.looked
            self._judged.tokens[(slice(None), *its_class)] += (1, token == expected)
            response.right += token == expected
            response.looked = rest if token == expected else []
            if not response.looked:
                self._note(response.hoped, response.right)

    def _note(self, hoped: float, came: int) -> None:
        """A look is over."""
        if hoped >= 0:
            self._judged.looks[:] += (1, hoped, came, hoped * hoped, hoped * came)

    def look(
        self, responses: Numbers, most: int, deepest: int, rates: NDArray[np.float64]
    ) -> tuple[Drafts, NDArray[np.float64]]:
        found = np.zeros((len(responses), deepest))
        for row, number in enumerate(responses):
            response = self._responses[int(number)]
            matched, live = self._matching(response)
            looked, chance, hoped = [], 1.0, 0.0
            for column, (token, share) in enumerate(_votes(live, deepest)):
                its_class = class_of(matched + column, float(share))
                looked.append((token, its_class))
                chance *= float(rates[its_class])
                found[row, column] = chance
                hoped += chance
            before, response.newest = response.newest, hoped
            if not looked:
                self._note(before, 0)
            elif not response.looked:
                response.looked, response.right, response.hoped = looked, 0, before
        return self.draft(responses, most), found

    def judged(self) -> Judged:
        tokens, looks = self._judged
        found = Judged(tokens.copy(), looks.copy())
        tokens[:] = looks[:] = 0
        return found

    def draft(self, responses: Numbers, most: int) -> Drafts:
        drafts = no_drafts(len(responses), most)
        for row, number in enumerate(responses):
            matched, live = self._matching(self._responses[int(number)])
            if live:
                drafts.matched[row], drafts.versions[row] = matched, live[0][0].version
            chance = np.float32(1)
            for column, (token, share) in enumerate(_votes(live, min(most, DEEPEST))):
                chance *= share
                drafts.tokens[row, column], drafts.chances[row, column] = token, chance
                drafts.lengths[row] = column + 1
        return drafts

    def _matching(self, response: Response) -> tuple[int, list[Place]]:
        """How many of a response's last tokens were found, and the places after them."""
        for context in contexts(response.prompt, response.tail):
            if live := self._found(context):
                return len(context[1]), live
        return 0, []

    def _found(self, context: Context) -> list[Place]:
        following = (after(place) for place in reversed(self._places.get(context, ())))
        return [place for place, _ in zip((place for place in following if place), range(VOTES), strict=False)]

    @property
    def tokens(self) -> int:
        return sum(page.used for page in self._pages)

    @property
    def bytes(self) -> int:
        places = sum(map(sys.getsizeof, self._places.values()))
        return places + sum(sys.getsizeof(page.tokens) for page in self._pages)


def contexts(prompt: int, tokens: Sequence[int]) -> Iterator[Context]:
    """That end a text, the longest first."""
    return ((prompt, tuple(tokens[-length:])) for length in LENGTHS)


def after(place: Place) -> Place | None:
    """Of the next token of the same response."""
    page, end = place
    if end < len(page.tokens):
        return page, end + 1
    return None if page.next is None else (page.next, page.next.before + 1)


def class_of(matched: int, share: float) -> tuple[int, int]:
    """Of a token, by `MATCHED` and `SHARES`."""
    return max(0, sum(matched >= least for least in MATCHED) - 1), sum(share >= least for least in SHARES)


def _votes(live: list[Place], most: int) -> Iterator[tuple[int, np.float32]]:
    """Tokens, and which share of the places that are left is for each."""
    chance = np.float32(1)
    for _ in range(most):
        if not live:
            return
        said = [page.tokens[end - 1] for page, end in live]
        best, agreed = Counter(said).most_common(1)[0]  # of several the one that was met first: the newest
        share = np.float32(agreed / len(live))
        chance *= share
        if chance < np.float32(LEAST):
            return
        yield best, share
        live = [
            next_one for place, token in zip(live, said, strict=True) if token == best and (next_one := after(place))
        ]
