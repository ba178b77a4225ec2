"""How much of a card flashinfer keeps for its plans: which block of a kernel does what.

Every wrapper of flashinfer's has a buffer of 8 MiB for that, and SGLang makes one for each graph and for each step of
drafting. A plan has three numbers for each tile of queries, and one for each query (flashinfer's scheduler.cuh): far
less than 1 MiB for 256 requests with 32 tokens each. One that does not fit raises when its graph is captured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

PLAN_BYTES = 1 << 20


def trim(attention: Any) -> None:
    """Gives what a flashinfer backend of SGLang's has, and makes later, as much memory as plans take. attention: a
    backend, or one of several steps; another library's is left alone."""
    for backend in flashinfer_backends(attention):
        # not those of prefills: how long a prompt may be read at once, nobody knows here
        for wrapper in (*backend.decode_wrappers, *backend.prefill_wrappers_verify):
            _shrink(backend, wrapper)
        for name in ("_create_decode_wrappers", "_create_prefill_wrappers"):  # for graphs, as they are captured
            # override: flashinfer keeps 8 MiB for each wrapper's plan, of which it needs less than one
            setattr(backend, name, partial(_made, backend, getattr(backend, name)))


def flashinfer_backends(attention: Any) -> list[Any]:
    """An attention backend, or those of several steps, where they are flashinfer's: told by name, importing nothing."""
    every = getattr(attention, "attn_backends", [attention])
    return [each for each in every if any(kind.__name__ == "FlashInferAttnBackend" for kind in type(each).__mro__)]


def _made(backend: Any, make: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    wrappers = make(*args, **kwargs)
    for wrapper in wrappers:
        _shrink(backend, wrapper)
    return wrappers


def _shrink(backend: Any, wrapper: Any) -> None:
    floats = backend.workspace_buffer
    wrapper.reset_workspace_buffer(floats, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=floats.device))
