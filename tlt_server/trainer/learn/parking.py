"""Off a GPU and back: what a trainer keeps while it does not train, so that rollouts have the memory."""

import gc

import torch
from torch import Tensor, nn


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; to the host by way of pinned memory, several times as fast. `release` waits for such a copy."""
    if tensor.is_cuda and device.type == "cpu":
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device)


def move(module: nn.Module, device: torch.device) -> None:
    """All weights and buffers, in place: an optimiser that knows the weights knows them still."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.grad = None
        tensor.data = moved(tensor.data, device)


def release(device: torch.device) -> None:
    """Gives what nobody refers to back to the GPU; nothing without one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
