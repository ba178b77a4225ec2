"""How much a draft of history is worth: how often tokens with as long a match and as large a share of votes came.

Votes alone are far too sure, being few. What is counted is whether a token came once those before it had, so that a
step of one token teaches as well as one of many, and each depth of a draft by itself.
"""

import numpy as np
from numpy.typing import NDArray

from tlt_server.history.index import CLASSES

FIRST = np.outer((0.5, 0.65, 0.85, 0.92), (0.3, 0.5, 0.7, 0.9, 1.0))
"""Rates before anything was seen: of arithmetic's responses, roughly."""
BELIEVED = 8.0
"""Tokens that these count for."""
KEPT = 0.995
"""Of what was seen before, with each look: it remembers some two hundred."""


class Calibration:
    """Learned from what came after drafts, whether or not they were verified.

    rates: by match and share, [CLASSES].
    """

    def __init__(self) -> None:
        self._seen = np.zeros((2, *CLASSES))
        self.rates: NDArray[np.float64] = FIRST.copy()

    def learn(self, judged: NDArray[np.int64]) -> None:
        """As `History.judged` gives it."""
        self._seen *= KEPT
        self._seen += judged
        tried, came = self._seen
        self.rates = (came + BELIEVED * FIRST) / (tried + BELIEVED)
