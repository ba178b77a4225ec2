"""The seed of each request, as the noise takes it: 64 bits, the same on all ranks."""

import hashlib
from typing import Any

import torch


def seed_of(req: Any) -> int:
    """As int64. Of what the server itself asks, which has no seed, it is made of the request's id."""
    seed = req.sampling_params.sampling_seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(str(req.rid).encode(), digest_size=8).digest())
    return int((seed + (1 << 63)) % (1 << 64) - (1 << 63))


def seeds_of(reqs: list[Any], device: Any) -> torch.Tensor:
    """[bs] int64, on its way to the device."""
    return torch.tensor([seed_of(req) for req in reqs], dtype=torch.int64).to(device, non_blocking=True)
