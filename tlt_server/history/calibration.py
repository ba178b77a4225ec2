"""How much a draft of history is worth: how often tokens with as long a match and as large a share of votes came.

Votes alone are far too sure, being few. What is counted is whether a token came once those before it had, so that a
step of one token teaches as well as one of many, and each depth of a draft by itself.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_server.history.index import LENGTHS, Drafts

MATCHED = np.array(sorted(LENGTHS))
"""Tokens that match before a drafted one, those drafted before it among them, from which on it is in the next class."""
SHARES = np.array((0.4, 0.6, 0.8, 0.99))
"""Of votes, likewise."""
FIRST = np.outer((0.5, 0.65, 0.85, 0.92), (0.3, 0.5, 0.7, 0.9, 1.0))
"""Rates before anything was seen: of arithmetic's responses, roughly."""
BELIEVED = 8.0
"""Tokens that these count for."""
KEPT = 0.995
"""Of what was seen before, with each step: it remembers some two hundred."""


class Calibration:
    """Learned from what came after drafts, whether or not they were verified."""

    def __init__(self) -> None:
        self._trials = np.zeros(FIRST.shape)
        self._hits = np.zeros(FIRST.shape)

    @property
    def rates(self) -> NDArray[np.float64]:
        """By match and share: [4, 5]."""
        return (self._hits + BELIEVED * FIRST) / (self._trials + BELIEVED)

    def learn(self, drafts: Drafts, came: Sequence[Sequence[int]]) -> None:
        """came: what each of them went on with, as far as is known."""
        if not len(came):
            return
        most = drafts.tokens.shape[1]
        known = np.array([min(len(tokens), most) for tokens in came])[:, None]
        said = np.array([[*tokens[:most], *[-1] * (most - len(tokens))] for tokens in came]).reshape(len(came), most)
        depth = np.arange(most)
        judged = (depth < known) & (depth < drafts.lengths[:, None])
        right = np.cumprod((said == drafts.tokens) & judged, axis=1).astype(bool)
        tried = judged & np.concatenate((np.ones((len(came), 1), bool), right[:, :-1]), axis=1)
        cells = _cells(drafts)
        self._trials *= KEPT
        self._hits *= KEPT
        for counted, where in ((self._trials, tried), (self._hits, tried & right)):
            np.add.at(counted, tuple(each[where] for each in cells), 1.0)

    def lengths(self, drafts: Drafts) -> list[float]:
        """Expected accept length of a verify pass over so many tokens of each draft, from one on: a mean over them
        all, the bonus token included."""
        drafted = np.arange(drafts.tokens.shape[1]) < drafts.lengths[:, None]
        accepted = np.cumprod(np.where(drafted, self.rates[_cells(drafts)], 0.0), axis=1)
        means: list[float] = (1 + accepted.cumsum(axis=1)).mean(axis=0).tolist()
        return means


def _cells(drafts: Drafts) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Match and share of each drafted token, as classes: two of [n, most]."""
    matched = drafts.matched[:, None] + np.arange(drafts.tokens.shape[1])
    before = np.concatenate((np.ones_like(drafts.chances[:, :1]), drafts.chances[:, :-1]), axis=1)
    shares = drafts.chances / np.maximum(before, 1e-9)
    return np.maximum(np.searchsorted(MATCHED, matched, "right") - 1, 0), np.searchsorted(SHARES, shares, "right")
