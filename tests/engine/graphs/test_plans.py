"""flashinfer's plans get as much memory as they take. Its wrappers need a GPU; stand-ins have their two buffers."""

import ast
from pathlib import Path
from typing import Any

import sglang
import torch

from tlt_server.engine.graphs.workspace import PLAN_BYTES, trim

SOURCE = Path(sglang.__file__).parent / "srt/layers/attention/flashinfer_backend.py"
TRIMMED = (
    *("prefill_wrappers_verify", "decode_wrappers", "workspace_buffer"),
    *("_create_decode_wrappers", "_create_prefill_wrappers"),
)


class Wrapper:
    def __init__(self) -> None:
        self.floats, self.plan = torch.empty(0), torch.empty(8 << 20, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self.floats, self.plan = float_workspace_buffer, int_workspace_buffer


class FlashInferAttnBackend:
    def __init__(self) -> None:
        self.workspace_buffer = torch.empty(16)
        self.prefill_wrapper_ragged = Wrapper()
        self.prefill_wrappers_paged, self.prefill_wrappers_verify = [Wrapper()], [Wrapper()]
        self.decode_wrappers = [Wrapper()]

    def _create_decode_wrappers(self, bs: int, num_tokens: int) -> list[Any]:
        return [Wrapper()]

    def _create_prefill_wrappers(self, bs: int, use_custom_mask: bool = False) -> list[Any]:
        return [Wrapper(), Wrapper()]


class Own(FlashInferAttnBackend):
    pass


class Steps:
    def __init__(self) -> None:
        self.attn_backends = [FlashInferAttnBackend(), Own()]


def wrappers(backend: FlashInferAttnBackend) -> list[Any]:
    made = [*backend._create_decode_wrappers(4, 16), *backend._create_prefill_wrappers(4, use_custom_mask=True)]
    return [*backend.prefill_wrappers_verify, *backend.decode_wrappers, *made]


def test_wrappers_of_decode_steps_are_small_those_made_later_too() -> None:
    steps = Steps()
    trim(steps)
    for backend in steps.attn_backends:
        assert {each.plan.numel() for each in wrappers(backend)} == {PLAN_BYTES}
        assert all(each.floats is backend.workspace_buffer for each in wrappers(backend))
        prefills = [backend.prefill_wrapper_ragged, *backend.prefill_wrappers_paged]
        assert {each.plan.numel() for each in prefills} == {8 << 20}, "a prompt may be of any length"
    plans = [each.plan.data_ptr() for each in wrappers(steps.attn_backends[0])[:4]]
    assert len(set(plans)) == 4, "a plan is one wrapper's alone"


def test_other_backends_are_left_alone() -> None:
    trim(object())
    trim(None)


def test_upstreams_backend_has_what_is_trimmed() -> None:
    tree = ast.parse(SOURCE.read_text())
    (backend,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "FlashInferAttnBackend"]
    said = ast.unparse(backend)
    assert [name for name in TRIMMED if f"self.{name}" not in said] == []
