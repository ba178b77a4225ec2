"""A GPU's memory: within a budget beside a server, and given back while the trainer does not train."""

import gc

import torch
from torch import Tensor, nn

from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.network import Network

OTHERS_SHARE = 0.1
"""Of a GPU's memory, free for others where they share it."""
LEARNT, JUDGED = 20, 12
"""Bytes of a weight: it, its average, its gradient and two moments; those of three drafters to compare with."""


def needed(network: Network, frozen: Frozen) -> int:
    """Bytes that a leader holds before its first step, whose own use of memory grows with its entries."""
    weights = sum(int(weight.numel()) for weight in network.parameters())
    return weights * (LEARNT + JUDGED) + sum(int(each.nbytes) for each in (frozen.embedding, frozen.head))


def limit(gigabytes: float | None, device: torch.device, least: int = 0) -> None:
    """Lets torch take so much of the GPU, and no more; what CUDA and NCCL take for themselves is beside it.

    least: bytes that will be needed for sure.
    Raises ConfigError: there is no GPU, or not so much free on it, or it does not suffice.
    """
    if gigabytes is None:
        return
    if device.type != "cuda":
        raise ConfigError(f"memory_gb {gigabytes}: is of a GPU, but device is {device}. Leave one of them out")
    free, total = torch.cuda.mem_get_info(device)
    if least > gigabytes * 1e9:
        raise ConfigError(
            f"memory_gb {gigabytes}: drafter, moments, embedding and head take {least / 1e9:.1f}. Raise it"
        )
    if gigabytes * 1e9 > free:
        raise ConfigError(
            f"memory_gb {gigabytes}: of {total / 1e9:.1f} GB on {device} {free / 1e9:.1f} are free. Lower it, or leave "
            "more free: a server takes less by a lower --mem-fraction-static"
        )
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total, device)


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


def settle(device: torch.device) -> None:
    """Waits for what it was asked to compute."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relieve(device: torch.device) -> None:
    """As `release`, where less than OTHERS_SHARE is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < OTHERS_SHARE * total:
            release(device)
