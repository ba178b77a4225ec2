"""Rotary position embeddings as transformers' configs describe them (Su et al., arXiv 2104.09864)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tlt_server.errors import ConfigError


class Rope:
    """Cosines and sines of positions.

    Args:
        config: of the drafter; either transformers' `rope_parameters`, or `rope_theta` and `rope_scaling`.
        head_dim: width of a head.

    Raises:
        ConfigError: a kind of scaling other than Llama 3.1's.
    """

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = given.get("rope_type") or given.get("type") or "default"
        theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if kind == "llama3":
            frequencies = _slowed(frequencies, given)
        elif kind != "default":
            raise ConfigError(f"rope_type {kind}: a drafter that can be trained has default or llama3")
        self._frequencies = frequencies

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] -> cosines and sines, each [N, head_dim]; the two halves of a head rotate together."""
        angles = positions.float()[:, None] * self._frequencies.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [heads, N, head_dim], turned by each row's angles."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.to(x.dtype)


def _slowed(frequencies: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: waves longer than the old context turn `factor` times slower, short ones as before, a ramp between.

    Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (`apply_scaling`).
    """
    turns = given["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / given["factor"])
