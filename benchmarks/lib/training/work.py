"""The operations that training needs, and the rate at which a machine could do them.

Counted is what the algorithm needs and no more: nothing for padding, nothing that is computed again to save memory.
Forward and backward pass take two operations for each multiplication, and a weight that learns has a gradient of its
own: six operations a weight and row for the drafter's matrices; for the head four, which is frozen, and two more for
the target's law.
"""

import time
from collections.abc import Iterable

import torch

from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.packing import Pack

PEAKS = {"H200": 989.5, "H100": 989.5}
"""TFLOP/s of dense bfloat16 by the data sheet, by a part of the card's name (of the SXM cards)."""


def operations(trainer: Trainer, packs: Iterable[Pack]) -> float:
    """Of one step on `packs`, whose fillings, if any, are not counted; for an objective of one step a chain."""
    matrices = sum(weight.numel() for weight in trainer.network.parameters() if weight.dim() > 1)
    query = trainer.network.layers[0].self_attn.q_proj.out_features
    total = 0.0
    for pack in packs:
        lengths = [stop - first for first, stop in pack.bounds if bool(pack.counted[stop - 1])]
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        total += 6 * sum(lengths) * matrices + 6 * int(pack.counted.sum()) * trainer.frozen.head.numel()
        total += 12 * pairs * query
    return total


def peak_tflops(device: torch.device, size: int = 8192) -> float:
    """Of the data sheet; of a machine that it is not known of, the best of ten products of matrices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if known := [peak for part, peak in PEAKS.items() if part in name]:
        return known[0]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = size if device.type == "cuda" else 1024
    matrix, took = torch.randn(size, size, dtype=dtype, device=device), []
    for _ in range(10):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        took.append(time.perf_counter() - began)
    return 2 * size**3 / min(took) / 1e12
