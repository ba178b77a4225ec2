"""What a GPU, or a machine without one, is called by every process that sees it, whatever its number is for each."""

from pathlib import Path

import torch

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Of the running system: one for all containers of a machine, unlike its name."""


def identity(device: torch.device) -> str:
    """The same for a server and a trainer that compute on the same device, and for no other."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"CPU-{BOOT.read_text().strip()}"
