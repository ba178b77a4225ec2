"""The drafter's share of the noise: it proposes what the target is going to take, as far as it knows the target's law.

Its logits at position x of the sequence are of the token at x + 2: it has read the target's state at x and the token at
x + 1. With them divided by the request's temperature, and the noise of x + 2 added, the best is proposed.
"""

from typing import Any

import torch

from tlt_server.engine.sampling.noise import add_noise

AHEAD = 2


class DraftNoise:
    """Of one rank's batch, in tensors that stay where they are: CUDA graphs have captured them.

    rows: requests at most.
    """

    def __init__(self, rows: int, device: Any) -> None:
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._inverse_temperatures = torch.ones(rows, dtype=torch.float32, device=device)
        self._scales = torch.zeros(rows, dtype=torch.float32, device=device)
        self._followed: torch.Tensor | None = None

    def follow(self, info: Any, places: torch.Tensor | None = None) -> None:
        """From here on, of a batch by upstream's `SamplingBatchInfo`; places: of these of its requests, [n] int64."""
        if info is None or (places is None and info.sampling_seed is self._followed):
            return
        seeds, temperatures, greedy = info.sampling_seed, info.temperatures[:, 0], info.top_ks <= 1
        if places is not None:
            seeds, temperatures, greedy = seeds[places], temperatures[places], greedy[places]
        self._followed = info.sampling_seed if places is None else None
        count = len(seeds)
        self._seeds[:count] = seeds
        self._inverse_temperatures[:count] = (1 / temperatures).masked_fill(greedy, 1.0)
        self._scales[:count] = (~greedy).float()

    def add(self, logits: torch.Tensor, positions: torch.Tensor, each: int, token_map: torch.Tensor | None) -> None:
        """To the drafter's logits, in place.

        Args:
            logits: [bs * each, n] float32.
            positions: [bs * each] int64, the drafter's.
            each: rows of a request.
            token_map: the target's token of each of the drafter's, [n] int64; None: they are the same.
        """
        add_noise(
            logits, self._seeds, positions + AHEAD, self._inverse_temperatures, self._scales, token_map, rows_each=each
        )
