"""Logits of decode steps stay as the head computes them, on stand-ins for upstream's objects that hold what is read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tlt_server.engine.sampling.logits import as_read, keep_type

VOCAB, WIDTH, ROWS = 12, 8, 3
SETTINGS = {
    "do_tensor_parallel_all_gather": False,
    "do_tensor_parallel_all_gather_dp_attn": False,
    "logit_scale": None,
    "final_logit_softcapping": None,
    "use_fp32_lm_head": False,
    "rl_on_policy_target": None,
}


def kept(deterministic: bool = False, **settings: Any) -> LogitsProcessor:
    """A processor of a model whose logits keep their type, where settings allow."""
    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.vocab_size = VOCAB
    for name, value in (SETTINGS | settings).items():
        setattr(processor, name, value)
    runner = SimpleNamespace(
        server_args=SimpleNamespace(enable_deterministic_inference=deterministic),
        model=torch.nn.ModuleList([processor]),
    )
    keep_type(runner)
    return processor


def head(dtype: torch.dtype, rows: int = VOCAB) -> Any:
    return SimpleNamespace(weight=torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype))


def metadata(mode: ForwardMode, buffer: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(forward_mode=mode, next_token_logits_buffer=buffer)


def states(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spare", [None, 0, 5], ids=["no buffer", "a buffer", "a larger buffer"])
def test_decode_steps_have_what_the_head_computes(mode: ForwardMode, dtype: torch.dtype, spare: int | None) -> None:
    buffer = None if spare is None else torch.full((ROWS + spare, VOCAB), torch.nan)
    lm_head = head(dtype)
    logits = kept()._get_logits(states(dtype), lm_head, metadata(mode, buffer))
    assert logits.dtype == dtype
    assert torch.equal(logits, states(dtype) @ lm_head.weight.T)
    if buffer is not None:
        assert logits.data_ptr() == buffer.data_ptr()


def test_a_buffer_that_is_too_small_is_left_alone() -> None:
    buffer = torch.zeros(1, VOCAB)
    kept()._get_logits(states(torch.float32), head(torch.float32), metadata(ForwardMode.DECODE, buffer))
    assert not buffer.any()


@pytest.mark.parametrize(
    "settings",
    [
        {"do_tensor_parallel_all_gather": True},
        {"do_tensor_parallel_all_gather_dp_attn": True},
        {"logit_scale": 0.5},
        {"final_logit_softcapping": 30.0},
        {"use_fp32_lm_head": True},
        {"rl_on_policy_target": "fsdp"},
        {"deterministic": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_where_more_comes_after_the_head_upstream_computes_them(settings: dict[str, Any]) -> None:
    assert "_get_logits" not in vars(kept(**settings))


def fell_back(lm_head: Any, mode: ForwardMode = ForwardMode.DECODE, *rest: Any) -> bool:
    """Whether upstream was asked."""
    processor, asked = kept(), []
    wrapped = vars(processor)["_get_logits"]
    wrapped.func(processor, lambda *args: asked.append(args), states(torch.float32), lm_head, metadata(mode), *rest)
    return bool(asked)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
def test_of_prefills_upstream_computes_them(mode: ForwardMode) -> None:
    assert fell_back(head(torch.float32), mode)
    assert not fell_back(head(torch.float32))


@pytest.mark.parametrize("kind", ["no weight", "integers", "fp8", "padded", "LoRA", "quantised", "biased"])
def test_heads_that_are_no_plain_matmul_are_left_to_upstream(kind: str) -> None:
    lm_head, rest = head(torch.float32), []
    if kind == "no weight":
        del lm_head.weight
    elif kind == "integers":
        lm_head.weight = lm_head.weight.to(torch.int32)
    elif kind == "fp8":
        lm_head.weight = lm_head.weight.to(torch.float8_e4m3fn)
    elif kind == "padded":
        lm_head = head(torch.float32, VOCAB + 4)
    elif kind == "LoRA":
        lm_head.set_lora = lm_head.apply_lora = None
    elif kind == "quantised":
        lm_head.quant_method = SimpleNamespace(apply=lambda *_: None)
    else:
        rest = [torch.zeros(VOCAB)]
    assert fell_back(lm_head, ForwardMode.DECODE, *rest)


def batch(**asked: Any) -> Any:
    """A batch that asks for nothing, but what is asked."""
    penalised = asked.pop("penalties", False)
    info = {"logit_bias": None, "is_all_greedy": False, "penalties": SimpleNamespace(applies=lambda _: penalised)}
    info |= {name: asked.pop(name) for name in info.keys() & asked.keys()}
    return SimpleNamespace(
        **{"has_grammar": False, "return_logprob": False} | asked, sampling_info=SimpleNamespace(**info)
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"penalties": True},
        {"logit_bias": torch.zeros(1, VOCAB)},
        {"has_grammar": True},
        {"return_logprob": True, "is_all_greedy": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_who_changes_logits_changes_them_in_float32(asked: dict[str, Any]) -> None:
    """0.1 more than 20 is 20 in bfloat16."""
    logits = torch.full((1, VOCAB), 20.0, dtype=torch.bfloat16)
    assert as_read(logits, batch(**asked)).dtype == torch.float32


@pytest.mark.parametrize("asked", [{}, {"is_all_greedy": True}, {"return_logprob": True}])
def test_else_they_are_read_as_they_are(asked: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    assert as_read(logits, batch(**asked)) is logits


def test_logprobs_of_undivided_logits_are_of_float32() -> None:
    from sglang.srt.environ import envs

    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    with envs.SGLANG_RETURN_ORIGINAL_LOGPROB.override(True):
        assert as_read(logits, batch(return_logprob=True)).dtype == torch.float32
