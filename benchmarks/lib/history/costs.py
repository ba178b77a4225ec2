"""What the index costs: time and memory of batches that look as a server's."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tlt_server.history.index import History, Ints, tail_of

BATCH, GROUP, STEP, DRAFTS = 64, 16, 4, 7
"""Requests; siblings among them; tokens that each says a step; that are looked up for it."""
WORDS = 50_000
CHANGED = 0.1
"""Of a prompt's text, in each response to it: after such a token short contexts are looked for, and votes differ."""


class Times(NamedTuple):
    """Of the processor, in us: adding one token, in each step; all lookups of a step; those that find nothing."""

    add: Sequence[float]
    lookup: Sequence[float]
    empty: Sequence[float]


def _responses(length: int, rng: np.random.Generator) -> tuple[list[int], Ints]:
    """Of BATCH requests: the prompt that each is of; and what it says, [BATCH, length]."""
    of = np.arange(BATCH) // GROUP
    texts = rng.integers(0, WORDS, (BATCH // GROUP, length)).astype(np.int32)[of]
    changed = rng.random(texts.shape) < CHANGED
    texts[changed] = rng.integers(0, WORDS, int(changed.sum()))
    prompts = rng.integers(0, 2**63, BATCH // GROUP)
    return [int(prompts[group]) for group in of], texts


def _steps(length: int, rng: np.random.Generator) -> Iterator[tuple[list[int], Ints]]:
    """Prompts of responses that begin, or none; and the step's tokens."""
    while True:
        begun, texts = _responses(length, rng)
        for at in range(0, length, STEP):
            yield begun if at == 0 else [], texts[:, at : at + STEP].ravel()


def times(index: History, tokens: int, length: int) -> Times:
    """Of the last third of so many tokens, in responses of a length."""
    numbers, counts, found = range(BATCH), [STEP] * BATCH, Times([], [], [])
    steps, nothing = tokens // (BATCH * STEP), range(BATCH, 2 * BATCH)
    for number in nothing:
        index.begin(number, number, tail_of([]), 0)
    for step, (begun, said) in zip(range(steps), _steps(length, np.random.default_rng(0)), strict=False):
        for number, prompt in enumerate(begun):
            index.begin(number, prompt, tail_of(range(20)), 0)
        marks = [time.thread_time()]  # others are at work on the same cores
        index.add(numbers, counts, said)
        marks.append(time.thread_time())
        index.draft(numbers, DRAFTS)
        marks.append(time.thread_time())
        index.draft(nothing, DRAFTS)
        marks.append(time.thread_time())
        if 3 * step >= 2 * steps:
            add, lookup, empty = np.diff(marks) * 1e6
            for kept, value in zip(found, (add / (BATCH * STEP), lookup, empty), strict=True):
                kept.append(float(value))  # type: ignore[attr-defined]
    return found
