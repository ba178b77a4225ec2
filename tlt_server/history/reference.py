"""The index in plain Python."""

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_server.history.index import LEAST, LENGTHS, PAGE, VOTES, Drafts, Ints, no_drafts

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
    prompt: int
    version: int
    tail: list[int]
    page: Page | None = None


Place = tuple[Page, int]
"""A page, and the number of tokens in it up to and with the place's own."""


@dataclass(eq=False)
class PlainIndex:
    """`History`, some fifty times slower and larger than the compiled one."""

    capacity: int
    _pages: deque[Page] = field(default_factory=deque)
    _places: dict[Context, deque[Place]] = field(default_factory=lambda: defaultdict(deque))
    _responses: dict[int, Response] = field(default_factory=dict)

    def begin(self, response: int, prompt: int, tail: Ints, version: int) -> None:
        self._responses[response] = Response(prompt, version, tail.tolist())

    def stamp(self, responses: Sequence[int], version: int) -> None:
        for number in responses:
            self._responses[number].version = version

    def add(self, responses: Sequence[int], counts: Sequence[int], tokens: Ints) -> None:
        rest = iter(tokens.tolist())
        for number, count in zip(responses, counts, strict=True):
            for _ in range(count):
                self._add(self._responses[number], next(rest))

    def _add(self, response: Response, token: int) -> None:
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

    def draft(self, responses: Sequence[int], most: int) -> Drafts:
        drafts = no_drafts(len(responses), most)
        for row, number in enumerate(responses):
            response = self._responses[number]
            for context in contexts(response.prompt, response.tail):
                if live := self._found(context):
                    drafts.matched[row] = len(context[1])
                    drafts.versions[row] = live[0][0].version
                    _vote(live, row, drafts)
                    break
        return drafts

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


def _vote(live: list[Place], row: int, drafts: Drafts) -> None:
    chance = np.float32(1)
    for column in range(drafts.tokens.shape[1]):
        if not live:
            return
        said = [page.tokens[end - 1] for page, end in live]
        best, agreed = Counter(said).most_common(1)[0]  # of several the one that was met first: the newest
        chance *= np.float32(agreed / len(live))
        if chance < np.float32(LEAST):
            return
        drafts.tokens[row, column], drafts.chances[row, column] = best, chance
        drafts.lengths[row] = column + 1
        live = [
            next_one for place, token in zip(live, said, strict=True) if token == best and (next_one := after(place))
        ]
