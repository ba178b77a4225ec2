"""The CPU engine: what SGLang lacks on a machine without a GPU, put in place before it is imported."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.errors import UnsupportedError


def install() -> None:
    """Prepares this process for SGLang's import. Does nothing on a machine whose GPU is in use."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from tlt_server.engine.cpu import alike, kernels

    # override: it has no CPU build, and SGLang imports it at start
    sys.modules["sgl_kernel"] = kernels
    # override: theirs refuse a CPU
    sys.modules["sglang.srt.batch_invariant_ops"] = alike
    # override: many models wait for CUDA when they are given an embedding and a head, whatever they run on
    torch.cuda.synchronize = lambda *_: None
    mend_torchvision()


def start_method() -> str:
    """How a server's processes are started, which is what comes next: on a CPU as forks of the launcher, which has
    imported all that they need. They have the threads that `OMP_NUM_THREADS` gives them.

    Where there is a GPU they are spawned, as upstream does: what has asked for CUDA must not be forked.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return "spawn"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return "fork"


def create_attention_backend(model_runner: Any) -> Any:
    """The attention backend of a model runner: prefill, decode, verify. UnsupportedError: it would not do what is asked
    for."""
    from tlt_server.engine.cpu.attention import CpuAttnBackend

    if model_runner.server_args.enable_deterministic_inference and model_runner.sliding_window_size is not None:
        raise UnsupportedError(
            "--enable-deterministic-inference: on a CPU not with sliding windows, which this target has. Drop the flag"
        )
    return CpuAttnBackend(model_runner)


def draft_backends(factory: Any) -> dict[str, Callable[[], Any]]:
    """What upstream's `DraftBackendFactory` can draft with beside its own: name to constructor."""
    from tlt_server.engine.cpu.attention import CpuDraftAttnBackend

    runner, topk, steps = factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    return {"torch_native": lambda: CpuDraftAttnBackend(runner, topk, steps)}


def draft_extend_backends(factory: Any) -> dict[str, Callable[[], Any]]:
    """What upstream's `DraftBackendFactory` can draft-extend with beside its own: name to constructor."""
    return {"torch_native": lambda: create_attention_backend(factory.draft_model_runner)}


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Sets the logits that a grammar forbids to -inf, in place: [rows, vocab] on the CPU, of any float dtype.
    bitmask: [rows, ceil(vocab / 32)] int32, bit v of a row set where token v is allowed."""
    shifts = torch.arange(32, dtype=torch.int32)
    allowed = (bitmask[:, :, None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~allowed, float("-inf"))
