"""The kernels' Gumbel variate of given bits, which the noise of no seed reaches at its ends."""

import numpy as np
import torch
import triton
import triton.language as tl

from tlt_server.engine.sampling.kernels import _gumbel


@triton.jit
def _variates(high, low, out, N: tl.constexpr):
    at = tl.arange(0, N)
    first = tl.load(high + at).to(tl.uint32, bitcast=True)
    second = tl.load(low + at).to(tl.uint32, bitcast=True)
    tl.store(out + at, _gumbel(first, second))


def variates(high: np.ndarray, low: np.ndarray, device: str) -> np.ndarray:
    """Of a power of two of words, uint64 below 2**32: float32."""
    out = torch.empty(len(high), device=device)
    words = (torch.from_numpy(each.astype(np.uint32).view(np.int32)).to(device) for each in (high, low))
    _variates[(1,)](*words, out, N=len(high))
    return out.cpu().numpy()
