"""Lengths of a batch, as far as the CPU knows them while the step before still runs, and plans that hold for them all.

SGLang has the CPU wait for what a step accepted before it prepares the next one, as flashinfer plans by lengths; and
while the CPU then prepares, the GPU idles. But of a request a plan says no more than into how many chunks of one size
its keys are cut: a kernel reads its length on the GPU, and cuts its last chunk there. So a plan for the greatest length
holds for each that is cut into as many chunks.
"""

from collections.abc import Sequence

import numpy as np
import torch

TRIED = 512
"""Sizes of chunks beyond the planner's own; and how many at a time."""
AT_ONCE = 32


class Lengths:
    """Of the batch of the step that is being launched, for all its planners. slack: how much shorter than `most` any
    may be, tokens."""

    def __init__(self) -> None:
        self._most: torch.Tensor | None = None
        self.slack = 0

    def tell(self, least: Sequence[int], slack: int) -> None:
        """Each request has at least so many tokens, and at most `slack` more."""
        self._most, self.slack = torch.tensor(least, dtype=torch.int32) + slack, slack

    def forget(self) -> None:
        """They are not known."""
        self._most = None

    @property
    def total(self) -> int | None:
        """Tokens of all requests, at most; None: not known."""
        return None if self._most is None else int(self._most.sum())

    def most(self, rows: int) -> torch.Tensor | None:
        """The greatest of each, [rows] int32; 1 of those that pad the batch. None: not known."""
        if self._most is None:
            return None
        return torch.nn.functional.pad(self._most, (0, rows - len(self._most)), value=1)


def chunk_for(most: np.ndarray, slack: int, chunk: int) -> int | None:
    """The size of chunks, `chunk` or a larger one, that cuts each length into as many chunks though it be shorter by
    `slack`. None: there is none with which one length has two chunks, as flashinfer wants for a CUDA graph.

    most: [n] ints, lengths at most.
    """
    least = np.maximum(most - slack, 1)
    if _cuts_alike(most, least, np.array([chunk]))[0]:
        return chunk
    end = min(chunk + TRIED, int(most.max()))
    for first in range(chunk + 1, end, AT_ONCE):
        sizes = np.arange(first, min(first + AT_ONCE, end))
        if (alike := _cuts_alike(most, least, sizes)).any():
            return int(sizes[alike.argmax()])
    return None


def _cuts_alike(most: np.ndarray, least: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[m] bool: whether each of the sizes cuts all lengths into as many chunks as the shorter ones."""
    found: np.ndarray = ((most - 1) // sizes[:, None] == (least - 1) // sizes[:, None]).all(1)
    return found
