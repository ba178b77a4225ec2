"""Logits of decode steps in the type that the head computes them in.

Upstream copies them to float32: 0.23 ms at 512 verified tokens of 152 thousand, beside 0.31 of choosing among them
(`profile.h200.json`). The kernels here read bfloat16 as it is: nothing is lost, for the values are the same. Who
changes logits, or has a softmax of them in their own type, is given float32.
"""

from functools import partial
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessor, should_apply_lm_head_quant_method
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.utils import use_intel_amx_backend

STEPS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
"""Passes whose logits we alone read. Those of prefills upstream has logprobs of, and prunes."""


def keep_type(runner: Any) -> None:
    """From here on, and before anything is captured, of the passes of an EAGLE worker's model runner."""
    if runner.server_args.enable_deterministic_inference:
        return  # its matmul, the same for all batch sizes, writes to no buffer
    for processor in runner.model.modules():
        if isinstance(processor, LogitsProcessor) and _leaves_as_computed(processor):
            # override: the copy to float32 lies between the head and all that is handed out
            processor._get_logits = partial(_logits, processor, processor._get_logits)


def _leaves_as_computed(processor: Any) -> bool:
    """Whether nothing but the copy comes after the head."""
    gathered = processor.do_tensor_parallel_all_gather or processor.do_tensor_parallel_all_gather_dp_attn
    changed = processor.logit_scale is not None or bool(processor.final_logit_softcapping)
    other_head = processor.use_fp32_lm_head or processor.rl_on_policy_target is not None
    return not (gathered or changed or other_head)


def _logits(
    processor: Any,
    upstream: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    metadata: Any,
    embedding_bias: torch.Tensor | None = None,
    use_logits_buffer: bool = True,
) -> torch.Tensor:
    """As upstream's `LogitsProcessor._get_logits`: [rows, vocab], of the head's type where it is a plain matmul."""
    ours = metadata.forward_mode in STEPS and embedding_bias is None
    if not (ours and _is_matmul(lm_head, processor.vocab_size)):
        logits: torch.Tensor = upstream(hidden_states, lm_head, metadata, embedding_bias, use_logits_buffer)
        return logits
    weight, buffer = lm_head.weight, metadata.next_token_logits_buffer if use_logits_buffer else None
    out = None if buffer is None else _within(buffer, len(hidden_states), len(weight), weight.dtype)
    return torch.matmul(hidden_states.to(weight.dtype), weight.T, out=out)


def _is_matmul(lm_head: Any, vocab: int) -> bool:
    weight = getattr(lm_head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.itemsize < 2 or len(weight) > vocab:
        return False
    quantised = should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    return not (quantised or hasattr(lm_head, "set_lora") or use_intel_amx_backend(lm_head))


def _within(buffer: torch.Tensor, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The part of upstream's float32 buffer, which all CUDA graphs share, that these logits take; None: too small."""
    flat = buffer.view(-1).view(dtype)
    return flat[: rows * vocab].view(rows, vocab) if rows * vocab <= len(flat) else None


def as_read(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Logits as they are, or in float32 where penalties, bias or a grammar change them, or logprobs are taken of them
    undivided. batch: upstream's `ScheduleBatch`, whose `sampling_info` holds the `Penalties`."""
    info = batch.sampling_info
    changed = batch.has_grammar or info.logit_bias is not None or info.penalties.applies(batch)
    undivided = batch.return_logprob and (info.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get())
    return logits.float() if changed or undivided else logits
