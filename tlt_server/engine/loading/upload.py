"""Tensors on their way to the GPU beside decode steps.

On a stream of their own, and in pieces: the small copies of a step itself take the same copy engine, and each waits for
the copy that is under way there, whatever its stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PIECE = 1 << 22
"""Bytes of one copy: 0.1 ms at the 50 GB/s of PCIe 5. The largest matrix of a 7B target's drafter, whole, takes 2.7."""


class Upload:
    """The way to one device; where that is the CPU, there is nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the GPU inside does not wait for the decode steps, nor they for it; all of it is done at the end,
        which this thread alone waits for, without the interpreter's lock."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; a small one as it is. To be called `aside`. tensor: contiguous."""
        if self._stream is None or tensor.nbytes <= PIECE:
            return tensor
        there = torch.empty_like(tensor, device=self._device)
        to, source = there.view(-1), tensor.view(-1)
        step = PIECE // tensor.itemsize
        for begin in range(0, len(source), step):
            to[begin : begin + step].copy_(source[begin : begin + step], non_blocking=True)
            self._stream.synchronize()  # else the next piece could be ahead of a step's copy
        return there
