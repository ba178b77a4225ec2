"""The seed of each request, as the noise takes it: 64 bits, the same on all ranks."""

from typing import Any

import torch


def seeds_of(reqs: list[Any], device: Any) -> torch.Tensor:
    """[bs] int64, on its way to the device."""
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    return torch.tensor(seeds, dtype=torch.int64).to(device, non_blocking=True)
