"""Attention of graphs is ours where it can be, and SGLang's elsewhere. Kernels by Triton's interpreter, in a process of
its own: it is chosen at import."""

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch

from tests.engine.graphs.gpu_attention import FlashInferAttnBackend
from tlt_server.engine.graphs import attention, attention_kernels

SOURCE = Path(sglang.__file__).parent / "srt/layers/attention/flashinfer_backend.py"
TABLE = torch.zeros(4, 8, dtype=torch.int32)


@pytest.mark.slow
def test_each_query_sees_what_it_should() -> None:
    words = [sys.executable, "-W", "ignore", "-m", "tests.engine.graphs.gpu_attention", "--small"]
    ended = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("off by") == 6


TYPES = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*bf16", "parts": "*fp32", "sums": "*fp32", "table": "*i32"}
TYPES |= {"requests": "*i64", "lens": "*i64", "mask": "*i64", "scale": "fp32", "v_scale": "fp32", "cap": "fp32"}
SHARED = {"DIM": 128, "WIDTH": 128, "LEAST": 256}
OF_7B = {"GROUP": 7, "HEADS": 4, "CAPPED": False} | SHARED


def _attend(tile: int, words: int) -> tuple[str, dict[str, Any], dict[str, int]]:
    cut = attention_kernels.CUTS[tile]
    constants = OF_7B | {"TILE": tile, "KEYS": cut.keys, "WORDS": words} | ({} if words else {"mask": None})
    return "_attend", constants, {"num_stages": cut.stages}


MERGE = SHARED | {"KEYS": 64, "PIECES": 64, "EACH": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constants", "options"),
    [*(_attend(*each) for each in itertools.product(attention_kernels.CUTS, (0, 1))), ("_merge", MERGE, {})],
)
def test_it_compiles_for_hopper_and_fits(name: str, constants: dict[str, Any], options: dict[str, int]) -> None:
    from triton import compile  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    kernel = getattr(attention_kernels, name)
    names = kernel.arg_names
    types = {each: "constexpr" if each in constants else TYPES.get(each, "i32") for each in names}
    given = {(names.index(each),): value for each, value in constants.items()}
    strides = ("q_stride", "k_stride", "v_stride")
    aligned = [(i,) for i, each in enumerate(names) if types[each].startswith("*") or each in strides]
    source = ASTSource(kernel, types, given, {each: [["tt.divisibility", 16]] for each in aligned})
    made = compile(source, GPUTarget("cuda", 90, 32), options | {"enable_fp_fusion": True})
    assert made.metadata.shared < 114_000, "two programs for each multiprocessor"
    assert name == "_merge" or "cp.async" in made.asm["ptx"], "it waits for each key"


def test_what_is_no_graphs_attends_as_before() -> None:
    backend: Any = FlashInferAttnBackend(TABLE)
    calls: list[Any] = []
    backend.indices_updater_prefill.update = backend.indices_updater_decode.update = lambda *args, **_: calls.append(
        args
    )
    attention.attend_verification(backend, 4, chain=True)
    attention.attend_decodes(backend)
    backend.indices_updater_prefill.update("requests", "lens", prefill_wrappers=["flashinfer's"])
    backend.indices_updater_decode.update("requests", "lens", decode_wrappers=None)
    assert calls == [("requests", "lens")] * 2


def test_other_backends_and_sliding_windows_are_left_alone() -> None:
    windowed: Any = FlashInferAttnBackend(TABLE)
    windowed.dispatch_reason = "sliding window"
    for each in (windowed, object(), None):
        attention.attend_verification(each, 4, chain=True)
        attention.attend_drafts(each)
    assert "_create_prefill_wrappers" not in vars(windowed)


@pytest.mark.parametrize("wrong", [{"causal": False}, {"window_left": 8}])
def test_what_the_kernel_cannot_is_said(wrong: dict[str, Any]) -> None:
    queries = attention.Queries(TABLE, attention.Batch(1, torch.device("cpu")))
    asked: dict[str, Any] = {"sm_scale": 1.0, "logits_soft_cap": None, "k_scale": None, "v_scale": None} | wrong
    with pytest.raises(NotImplementedError, match="--attention-backend triton"):
        queries.forward(TABLE, (TABLE, TABLE), **asked)


def test_queries_are_read_where_they_lie() -> None:
    """By our attention; in rows of their own by flashinfer's, and where they have no dimension of their own."""
    queries = attention.Queries(TABLE, attention.Batch(1, torch.device("cpu")))
    beside_keys = torch.zeros(2, 12)
    assert attention.rows_of(beside_keys[:, :8], queries).data_ptr() == beside_keys.data_ptr()
    assert attention.rows_of(beside_keys[:, :8], object()).is_contiguous()
    assert attention.rows_of(beside_keys.T, queries).is_contiguous()


def test_a_replay_is_told_where_its_requests_lie() -> None:
    queries = attention.Queries(TABLE, attention.Batch(2, torch.device("cpu")))
    requests, lens = queries.batch.requests, queries.batch.lens
    queries.batch.tell(torch.tensor([3, 1]), torch.tensor([7, 5], dtype=torch.int32))
    assert (requests.tolist(), lens.tolist()) == ([3, 1], [7, 5])


def test_all_passes_of_a_draft_read_one_batch() -> None:
    backends: Any = [FlashInferAttnBackend(TABLE) for _ in range(3)]
    drafts: Any = SimpleNamespace(topk=1, speculative_num_steps=4, attn_backends=backends)
    drafts.req_to_token_pool, drafts.init_forward_metadata_out_graph = SimpleNamespace(req_to_token=TABLE), None
    attention.attend_drafts(drafts)
    batch = SimpleNamespace(
        batch_size=1, seq_lens=torch.tensor([5]), req_pool_indices=torch.tensor([2]), spec_info=None
    )
    drafts.init_forward_metadata_out_graph(batch, in_capture=True)
    made = [each.wrappers[0] for each in backends]
    assert [each.ahead for each in made] == [1, 2, 3]
    assert {id(each.batch) for each in made} == {id(made[0].batch)}
    batch.seq_lens = torch.tensor([6])
    drafts.init_forward_metadata_out_graph(batch)
    assert made[2].batch.lens.tolist() == [6]
    assert [each.wrappers[0] for each in backends] == made


def test_upstream_has_what_is_replaced() -> None:
    tree = ast.parse(SOURCE.read_text())
    said = {each.name: ast.unparse(each) for each in tree.body if isinstance(each, ast.ClassDef)}
    made = ("_create_prefill_wrappers", "_create_decode_wrappers", "_prepare_cuda_graph_metadata")
    for name in ("dispatch_reason", "enable_deterministic", *made):
        assert f"self.{name}" in said["FlashInferAttnBackend"]
    for name in ("FlashInferIndicesUpdaterPrefill", "FlashInferIndicesUpdaterDecode"):
        assert "self.update = self.update_single_wrapper" in said[name]
    for name in ("topk", "speculative_num_steps", "req_to_token_pool", "attn_backends"):
        assert f"self.{name}" in said["FlashInferMultiStepDraftBackend"]
