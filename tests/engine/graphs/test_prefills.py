"""Prefills are planned from the lengths that the CPU has: flashinfer is given what SGLang computes on the GPU, and that
it would have to wait for. SGLang's own updater runs; its kernel and flashinfer's wrappers, which need a GPU, do not."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention import flashinfer_backend

from tlt_server.engine.graphs import prefills

MOST = 8
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=MOST)
"""Of each, how many tokens are cached, and how many are new."""


class Wrapper:
    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []

    def begin_forward(self, *args: Any, **_: Any) -> None:
        self.planned.append(args)


class FlashInferAttnBackend:
    """Has what SGLang's updater reads of it."""

    dispatch_reason: str | None = None
    enable_deterministic = False
    flashinfer_kv_cache_dtype = torch.bfloat16
    num_wrappers = 1
    _swa_kv_pool = None
    dq_paged_kernel_lens = None

    def __init__(self) -> None:
        self.prefill_wrapper_ragged, self.prefill_wrappers_paged = Wrapper(), [Wrapper()]
        self.kv_indptr = self.qo_indptr = [torch.zeros(MOST + 1, dtype=torch.int32)]
        self.qo_indptr = [torch.zeros(MOST + 1, dtype=torch.int32)]
        self.kv_last_page_len = torch.ones(MOST, dtype=torch.int32)
        updater = flashinfer_backend.FlashInferIndicesUpdaterPrefill.__new__(
            flashinfer_backend.FlashInferIndicesUpdaterPrefill
        )
        updater.num_qo_heads, updater.num_kv_heads, updater.head_dim = 28, 4, 128
        updater.data_type = updater.q_data_type = torch.bfloat16
        updater.sliding_window_size, updater._swa_kv_pool, updater.attn_backend = None, None, self
        updater.kv_indptr, updater.qo_indptr = self.kv_indptr, self.qo_indptr
        updater.kv_last_page_len = self.kv_last_page_len
        updater.req_to_token = torch.zeros(MOST, 64, dtype=torch.int32)
        updater.prefill_wrapper_ragged = self.prefill_wrapper_ragged
        updater.update = updater.update_single_wrapper
        self.indices_updater_prefill = updater

    def plan(self, requests: list[tuple[int, int]], *, ragged: bool, told: bool = True) -> list[tuple[Any, ...]]:
        """What flashinfer was given, for the new tokens where they are apart, and for the cached ones."""
        cached, new = (torch.tensor(each) for each in zip(*requests, strict=True))
        lens = cached + new
        self.indices_updater_prefill.update(
            torch.arange(len(lens)),
            lens,
            lens.clone(),
            int(lens.sum()),
            cached,
            prefill_wrappers=self.prefill_wrappers_paged,
            use_ragged=ragged,
            encoder_lens=None,
            spec_info=None,
            extend_prefix_lens_cpu=cached.tolist() if told else None,
        )
        return [*self.prefill_wrapper_ragged.planned, *self.prefill_wrappers_paged[0].planned]


@pytest.fixture(autouse=True, scope="module")
def _without_a_gpu() -> Iterator[None]:
    class Kernel:
        def __getitem__(self, _grid: Any) -> Any:
            return lambda *_: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_backend, "create_flashinfer_kv_indices_triton", Kernel())
        patch.setattr(prefills, "_mark", lambda: SimpleNamespace(synchronize=lambda: None))
        yield


@given(REQUESTS, st.booleans())
def test_flashinfer_is_given_the_same_lengths_and_need_not_wait(requests: list[tuple[int, int]], ragged: bool) -> None:
    upstream, ours = FlashInferAttnBackend(), FlashInferAttnBackend()
    prefills.plan_prefills(ours)
    expected, found = upstream.plan(requests, ragged=ragged), ours.plan(requests, ragged=ragged)
    assert len(found) == len(expected) == 1 + ragged
    on_gpu = {each.data_ptr() for each in (*ours.kv_indptr, *ours.qo_indptr, ours.kv_last_page_len)}
    for theirs, args in zip(expected, found, strict=True):
        assert len(args) == len(theirs)
        for want, have in zip(theirs, args, strict=True):
            if not isinstance(want, torch.Tensor):
                assert have == want
            elif len(want) <= len(requests) + 1:  # the places of tokens are more, and stay on the GPU
                assert have.tolist() == want.tolist()
                assert have.dtype == want.dtype
                assert have.data_ptr() not in on_gpu, "flashinfer would read it back"


def test_what_the_cpu_does_not_know_is_read_back() -> None:
    backend = FlashInferAttnBackend()
    prefills.plan_prefills(backend)
    (queries, *_), _ = backend.plan([(3, 2)], ragged=True, told=False)
    assert queries.data_ptr() == backend.qo_indptr[0].data_ptr()


def test_another_backend_is_left_alone() -> None:
    prefills.plan_prefills(None)
    prefills.plan_prefills(SimpleNamespace())
