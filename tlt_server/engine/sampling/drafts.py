"""The drafter's share of the noise: it proposes what the target is going to take, as far as it knows the target's law.

Its logits at position x of the sequence are of the token at x + 2: it has read the target's state at x and the token at
x + 1. With them divided by the request's temperature, and the noise of x + 2 added, the best is proposed.

A drafter whose law is wrong does better with less noise: beta * log q + g proposes more of what q finds best, and
without noise its best alone, whatever the seed. What is proposed changes no output, so beta follows what is measured:
now and then all of SHARPNESS propose, and are held against what the target takes.
"""

from typing import Any

import torch

from tlt_server.drafter.hits import SHARPNESS
from tlt_server.engine.sampling.noise import add_noise

AHEAD = 2
FIRST = 2
"""Of SHARPNESS, until something is measured: nearly the best for a good drafter and for a bad one."""
EVERY = 16
"""Draft-extends from one comparison to the next: it reads the drafter's logits five times."""
KEPT = 0.99
"""Of older comparisons, at each new one: it remembers some 1,600 steps, and follows drafter and target within them."""


class DraftNoise:
    """Of one rank's batch, in tensors that stay where they are: CUDA graphs have captured them. Nothing here waits for
    the GPU.

    rows: of the request pool.
    """

    def __init__(self, rows: int, device: Any) -> None:
        def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self._seeds = full(0, rows, dtype=torch.int64)
        self._inverse_temperatures, self._sampled, self._scales = full(1, rows), full(0, rows), full(0, rows)
        self._followed: torch.Tensor | None = None
        self._inverse = torch.tensor([1 / beta for beta in SHARPNESS], device=device)
        self._hits = full(0, len(SHARPNESS))
        self._hits[FIRST] = 1.0
        self._proposed = full(-1, rows, len(SHARPNESS), dtype=torch.int64)
        self._position = full(-1, rows, dtype=torch.int64)
        self._extends = 0

    def forget(self) -> None:
        """What is known of a drafter: another one is active from here on. It begins with what suited the last one,
        which it was mostly trained from."""
        best = self._hits.argmax().view(1)
        self._hits.zero_().index_fill_(0, best, 1.0)
        self._position.fill_(-1)
        self._choose()

    def _choose(self) -> None:
        self._scales.copy_(self._sampled * self._inverse.index_select(0, self._hits.argmax().view(1)))

    def follow(self, info: Any, places: torch.Tensor | None = None) -> None:
        """From here on, of a batch by upstream's `SamplingBatchInfo`; places: of these of its requests, [n] int64."""
        if info is None or (places is None and info.sampling_seed is self._followed):
            return
        seeds, temperatures, sampled = info.sampling_seed, info.temperatures[:, 0], info.top_ks > 1
        if places is not None:
            seeds, temperatures, sampled = seeds[places], temperatures[places], sampled[places]
        self._followed = info.sampling_seed if places is None else None
        count = len(seeds)
        self._seeds[:count] = seeds
        self._inverse_temperatures[:count] = (1 / temperatures).masked_fill(~sampled, 1.0)
        self._sampled[:count] = sampled.float()
        self._choose()

    def add(
        self, logits: torch.Tensor, positions: torch.Tensor, each: int, token_map: torch.Tensor | None
    ) -> torch.Tensor:
        """The drafter's logits with noise: [bs * each, n] float32.

        Args:
            logits: [bs * each, n], of any float type; left as they are.
            positions: [bs * each] int64, the drafter's.
            each: rows of a request.
            token_map: the target's token of each of the drafter's, [n] int64; None: they are the same.
        """
        return self._add(logits, positions, self._scales, each, token_map)

    def _add(self, logits: torch.Tensor, positions: torch.Tensor, scales: torch.Tensor, *shape: Any) -> torch.Tensor:
        each, token_map = shape
        at, temperatures = positions + AHEAD, self._inverse_temperatures
        return add_noise(logits, self._seeds, at, temperatures, scales, token_map, rows_each=each)

    def compare(
        self, logits: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, token_map: torch.Tensor | None
    ) -> None:
        """Notes what each of SHARPNESS proposes after a draft-extend, now and then.

        Args:
            logits: [bs, n], without noise; left as they are.
            positions: [bs] int64, the drafter's.
            requests: [bs] int64, places in the request pool.
            token_map: as of `add`.
        """
        self._extends += 1
        if self._extends % EVERY:
            return
        noisy = (self._add(logits, positions, self._sampled * inverse, 1, token_map) for inverse in self._inverse)
        best = torch.stack([each.argmax(-1) for each in noisy], -1)
        self._proposed[requests] = best if token_map is None else token_map[best]
        self._position[requests] = (positions + AHEAD).where(self._sampled[: len(requests)] > 0, -1)

    def tell(self, tokens: torch.Tensor, after: torch.Tensor, requests: torch.Tensor) -> None:
        """What the target took: tokens [bs] int, positions of those before [bs] int64, places in the request pool [bs]
        int64."""
        if self._extends % EVERY:
            return
        compared = self._position[requests] == after + 1
        hits = (self._proposed[requests] == tokens[:, None]) & compared[:, None]
        self._hits.mul_(KEPT).add_(hits.sum(0))
        self._choose()
