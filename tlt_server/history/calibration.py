"""How much a draft of history is worth: how often tokens with as long a match and as large a share of votes came.

Votes alone are far too sure, being few. What is counted is whether a token came once those before it had, so that a
step of one token teaches as well as one of many, and each depth of a draft by itself.

Products of such rates still scatter more than what comes does, and of all steps those that promise most are chosen: the
winner's curse. So what they promise is corrected by the line through what earlier ones promised, and gave.
"""

import numpy as np
from numpy.typing import NDArray

from tlt_server.history.index import CLASSES, LOOKS, Judged

FIRST = np.outer((0.5, 0.65, 0.85, 0.92), (0.3, 0.5, 0.7, 0.9, 1.0))
"""Rates before anything was seen: of arithmetic's responses, roughly."""
BELIEVED = 8.0
"""Tokens that these count for."""
KEPT = 0.995
"""Of what was seen before, with each look: it remembers some two hundred."""
LOOKS_KEPT = 1 - 1 / 100
"""Likewise of lookups of one request each, by which lengths are corrected."""
DOUBTED = 8.0
"""Squared tokens, over all lookups, that speak for no correction: as one of them scatters."""


class Calibration:
    """Learned from what came after drafts, whether or not they were verified.

    rates: by match and share, [CLASSES].
    """

    def __init__(self) -> None:
        self._seen, self._looks = np.zeros((2, *CLASSES)), np.zeros(LOOKS)
        self.rates: NDArray[np.float64] = FIRST.copy()

    def learn(self, judged: Judged) -> None:
        """As `History.judged` gives it."""
        self._looks *= LOOKS_KEPT ** judged.looks[0]
        self._looks += judged.looks
        self._seen *= KEPT
        self._seen += judged.tokens
        tried, came = self._seen
        self.rates = (came + BELIEVED * FIRST) / (tried + BELIEVED)

    def corrected(self, promised: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that come of so many drafted, from one on: a mean over requests, [deepest]."""
        looks, hoped, came, squares, products = self._looks
        if not looks or not promised[-1]:
            return promised
        mean, real = hoped / looks, came / looks
        spread, together = squares / looks - mean * mean, products / looks - mean * real
        slope = min(1.0, max(0.0, (together + DOUBTED / looks) / (spread + DOUBTED / looks)))
        deepest, shares = max(0.0, real + slope * (promised[-1] - mean)), promised / promised[-1]
        found: NDArray[np.float64] = np.minimum(deepest * shares, np.arange(1, len(promised) + 1))
        return found
