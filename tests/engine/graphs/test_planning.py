"""Plans of flashinfer's are made from the lengths that the CPU holds. Its planner needs a GPU: stand-ins note what it
is given, and the tables that kernels would write are written as upstream's kernels do."""

import ast
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.graphs import draft_plans, planning
from tlt_server.engine.graphs.lengths import TRIED, Lengths, chunk_for

SOURCE = Path(sglang.__file__).parent / "srt/layers/attention/flashinfer_backend.py"
MOST = 12
CHUNK = 9  # of the planner's own liking
BLOCKS, PADDED = 64, 8  # where a stand-in's plan has the chunks of each request; and how many bytes its last part has
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=MOST)


class Planner:
    """flashinfer's compiled module."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def plan(self, floats: Any, ints: Any, pinned: Any, starts: Any, ends: Any, lens: Any, *rest: Any) -> list[int]:
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (starts, ends, lens))
        self.given.append({"starts": starts.tolist(), "ends": ends.tolist(), "lens": lens.tolist(), "rest": rest})
        chunk = CHUNK if rest[-3] < 0 else rest[-3]
        assert chunk == CHUNK or max(lens) > chunk, "without a second chunk it is a plan of another kind"
        pinned[16:20].view(torch.int32)[0] = chunk
        ends_at = BLOCKS + 4 * len(lens)
        pinned[BLOCKS:ends_at].view(torch.int32)[:] = -(-lens // chunk)
        if ints is not None:
            ints[:ends_at].copy_(pinned[:ends_at])
        return [PADDED, *[0] * 8, 16, 0, 0, ends_at - PADDED, 1, 1]


class Wrapper:
    """A graph's, with the buffers that its kernels read."""

    def __init__(self, bs: int, masked: bool = False) -> None:
        self.is_cuda_graph_enabled, self._backend = True, "fa2"
        self._cached_module: Planner | None = None
        self._paged_kv_indptr_buf = torch.zeros(bs + 1, dtype=torch.int32)
        self._paged_kv_indices_buf = torch.full((MOST * 64,), -1, dtype=torch.int32)
        self._float_workspace_buffer = None
        self._int_workspace_buffer = torch.zeros(BLOCKS + 4 * MOST * 6, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros_like(self._int_workspace_buffer)
        self._mask_indptr_buf = torch.zeros(bs + 1, dtype=torch.int32)
        self._custom_mask_buf = torch.zeros(MOST * 64 * 9, dtype=torch.uint8)
        self.masked = masked
        self.planned: list[tuple[Any, Any]] = []
        self.begin_forward = self.plan
        self.use_tensor_cores = True

    @property
    def planner(self) -> Planner:
        assert self._cached_module is not None, "it has had no plan"
        return self._cached_module

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned.append((args, kwargs))
        self._cached_module = Planner()


class Updater:
    """Upstream's, which hands a mask on."""

    num_qo_heads, num_kv_heads, head_dim = 28, 4, 128

    def __init__(self) -> None:
        self.req_to_token = torch.arange(64 * 64, dtype=torch.int32).view(64, 64)
        self.calls = 0

    def update(self, *args: Any, **named: Any) -> None:
        self.calls += 1
        for wrapper in named.get("prefill_wrappers") or named["decode_wrappers"]:
            wrapper.begin_forward("lengths", custom_mask="mask")


class FlashInferAttnBackend:
    dispatch_reason: str | None = None
    enable_deterministic = False

    def __init__(self) -> None:
        self.indices_updater_prefill, self.indices_updater_decode = Updater(), Updater()
        self.decode_cuda_graph_metadata: dict[int, list[Wrapper]] = {}

    def _create_prefill_wrappers(self, bs: int, use_custom_mask: bool = False) -> list[Wrapper]:
        return [Wrapper(bs, use_custom_mask)]


def fill(req_to_token: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, wrapper: Wrapper) -> None:
    """What upstream's kernel writes, from what is there for it to read."""
    for request, length, start in zip(
        requests.tolist(), lens.tolist(), wrapper._paged_kv_indptr_buf.tolist(), strict=False
    ):
        wrapper._paged_kv_indices_buf[start : start + length] = req_to_token[request, :length]


class Packer:
    """flashinfer's."""

    @staticmethod
    def segment_packbits(mask: Any, starts: Any, packed: Any, bitorder: Any, into: torch.Tensor) -> None:
        for i in range(len(starts) - 1):
            assert starts[i + 1] <= len(mask), "it would read beyond the mask"
            found = np.packbits(mask[starts[i] : starts[i + 1]].numpy(), bitorder=bitorder)
            assert len(found) == packed[i + 1] - packed[i]
            into[packed[i] : packed[i + 1]] = torch.from_numpy(found)


class Mark:
    """An event of a GPU that is late."""

    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture(autouse=True, scope="module")
def _kernels_without_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_fill", fill)
        patch.setattr(planning, "_packer", Packer)
        patch.setattr(planning, "_mark", Mark)
        yield


def update(
    updater: Updater, wrapper: Wrapper, lens: list[int], host: bool = True, kind: str = "prefill", mask: Any = None
) -> list[int]:
    """Plans a batch twice, as when a graph is captured and replayed; its requests."""
    requests = list(range(3, 3 + len(lens)))
    on_gpu = torch.tensor(lens)
    named: dict[str, Any] = {f"{kind}_wrappers": [wrapper], "spec_info": SimpleNamespace(custom_mask=mask)}
    for _ in range(2):
        updater.update(torch.tensor(requests), on_gpu, on_gpu.clone() if host else None, sum(lens), **named)
    return requests


def holds(plan: dict[str, Any], lens: list[int]) -> None:
    """That the newest plan cuts each of these true lengths into as many chunks as the length it was made for."""
    chunk = plan["rest"][-3] if plan["rest"][-3] > 0 else CHUNK
    assert all(most >= length for most, length in zip(plan["lens"], lens, strict=True))
    assert [-(-most // chunk) for most in plan["lens"]] == [-(-length // chunk) for length in lens]


@given(LENGTHS, st.integers(2, 9), st.integers(0, 9), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_plan_holds_for_what_the_step_before_gives(
    least: list[int], verified: int, slack: int, padding: int, random: Random
) -> None:
    """It is not known yet when the plan is made: kernels read lengths where the GPU has written them."""
    backend, lengths = FlashInferAttnBackend(), Lengths()
    planning.plan_verification(backend, verified, lengths, chain=True)
    lens = [length + random.randint(0, slack) for length in least] + [1] * padding
    (wrapper,) = backend._create_prefill_wrappers(len(lens))
    wrapper.plan()
    lengths.tell(least, slack)
    update(backend.indices_updater_prefill, wrapper, lens, host=False)
    holds(wrapper.planner.given[-1], [length + verified for length in lens])
    assert wrapper._paged_kv_indptr_buf.diff().tolist() == [length + verified for length in lens]
    lengths.forget()
    calls = backend.indices_updater_prefill.calls
    update(backend.indices_updater_prefill, wrapper, lens, host=False)
    assert backend.indices_updater_prefill.calls == calls + 2, "nobody knows them: upstream reads them back"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64), st.integers(0, 20), st.integers(1, 600))
def test_a_size_of_chunks_cuts_all_lengths_alike_or_there_is_none(lens: list[int], slack: int, own: int) -> None:
    most = np.array(lens)
    found = chunk_for(most, slack, own)

    def alike(chunk: int) -> bool:
        return all(-(-length // chunk) == -(-max(length - slack, 1) // chunk) for length in lens)

    if found is None:
        assert not any(alike(chunk) for chunk in range(own, min(own + TRIED, max(lens))))
    else:
        assert alike(found)
        assert found == own or own < found < max(lens)


@given(LENGTHS, st.integers(2, 9))
def test_a_chains_verification_reads_each_requests_tokens_and_its_own(lens: list[int], verified: int) -> None:
    backend = FlashInferAttnBackend()
    planning.plan_verification(backend, verified, Lengths(), chain=True)
    (wrapper,) = backend._create_prefill_wrappers(len(lens), use_custom_mask=True)
    requests = update(backend.indices_updater_prefill, wrapper, lens)
    assert not wrapper.masked
    assert [named for _, named in wrapper.planned] == [{"custom_mask": None}], "once by upstream, without a mask"
    (given_,) = wrapper.planner.given
    whole = [length + verified for length in lens]
    assert given_["lens"] == whole
    assert given_["ends"] == wrapper._paged_kv_indptr_buf.tolist() == [sum(whole[:i]) for i in range(len(lens) + 1)]
    assert given_["starts"] == [verified * i for i in range(len(lens) + 1)]
    assert given_["rest"][:4] == (verified * len(lens), len(lens), 28, 4)
    rows = backend.indices_updater_prefill.req_to_token
    places = torch.cat([rows[request, :length] for request, length in zip(requests, whole, strict=True)])
    assert wrapper._paged_kv_indices_buf[: sum(whole)].tolist() == places.tolist()


@pytest.mark.slow
@given(LENGTHS, st.integers(2, 9), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_trees_mask_is_packed_where_the_kernel_reads_it(
    lens: list[int], verified: int, padding: int, random: Random
) -> None:
    backend = FlashInferAttnBackend()
    planning.plan_verification(backend, verified, Lengths(), chain=False)
    padded = [*lens, *([1] * padding)]
    (wrapper,) = backend._create_prefill_wrappers(len(padded), use_custom_mask=True)
    masks = [[random.random() < 0.5 for _ in range(verified * (length + verified))] for length in lens]
    known = torch.tensor([seen for mask in masks for seen in mask])
    update(backend.indices_updater_prefill, wrapper, padded, mask=known)
    assert wrapper.masked
    assert [named for _, named in wrapper.planned] == [{"custom_mask": "mask"}]
    starts = wrapper._mask_indptr_buf.tolist()
    for mask, start, end in zip(masks, starts, starts[1:], strict=False):
        found = np.unpackbits(wrapper._custom_mask_buf[start:end].numpy(), bitorder="little")
        assert found[: len(mask)].tolist() == mask
    assert wrapper.planner.given[0]["lens"] == [length + verified for length in padded]


@given(LENGTHS, st.integers(1, 9))
def test_a_draft_extends_lengths_count_its_tokens_already(lens: list[int], rows: int) -> None:
    backend = FlashInferAttnBackend()
    planning.plan_extends(backend, rows, Lengths())
    (wrapper,) = backend._create_prefill_wrappers(len(lens))
    update(backend.indices_updater_prefill, wrapper, lens)
    (given_,) = wrapper.planner.given
    assert given_["lens"] == lens
    assert given_["starts"][-1] == rows * len(lens)


@given(LENGTHS)
def test_a_plain_step_has_one_query_for_each_request(lens: list[int]) -> None:
    backend = FlashInferAttnBackend()
    planning.plan_decodes(backend, Lengths())
    wrapper = Wrapper(len(lens))
    update(backend.indices_updater_decode, wrapper, lens, kind="decode")
    (given_,) = wrapper.planner.given
    assert given_["lens"] == lens
    assert given_["starts"] == list(range(len(lens) + 1))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6), st.booleans(), st.none() | st.integers(0, 6))
def test_drafting_plans_what_upstreams_kernel_writes(
    lens: list[int], topk: int, passes: int, captures: bool, slack: int | None
) -> None:
    bs = len(lens)
    backends = [FlashInferAttnBackend() for _ in range(passes)]
    for backend in backends:
        backend.decode_cuda_graph_metadata[bs] = [Wrapper(bs * topk)]
        backend.decode_cuda_graph_metadata[bs][0].plan()
    written = torch.zeros(passes + 1, bs * topk + 1, dtype=torch.int32)

    def kernel(positions: torch.Tensor) -> None:
        """As `generate_draft_decode_kv_indices` does its last lines."""
        for i in range(passes + 1):
            for zid in range(1, bs * topk + 1):
                written[i, zid] = positions[:zid].sum() + zid * (i + 1)

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert grid == (passes + 1, bs, topk)
            return lambda *args: kernel(args[5])

    upstream: list[bool] = []
    attention = SimpleNamespace(
        attn_backends=backends,
        topk=topk,
        speculative_num_steps=passes + 1,
        page_size=1,
        pool_len=64,
        kv_indptr=written,
        cuda_graph_kv_indices=torch.zeros(passes + 1, 8),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        generate_draft_decode_kv_indices=Launched(),
        init_forward_metadata_out_graph=lambda batch, in_capture: upstream.append(in_capture),
    )
    lengths, host = Lengths(), torch.tensor(lens)
    draft_plans.plan_drafts(attention, lengths)
    if slack is not None:
        lengths.tell(lens, slack)  # which they may be longer, and are not
    batch = SimpleNamespace(
        batch_size=bs,
        seq_lens=host,
        seq_lens_cpu=host if slack is None else None,
        req_pool_indices=None,
        positions=host.repeat_interleave(topk),
    )
    attention.init_forward_metadata_out_graph(batch, in_capture=captures)
    assert upstream == [True] * captures
    for backend, row in zip(backends, written, strict=False):
        (wrapper,) = backend.decode_cuda_graph_metadata[bs]
        plan = wrapper._int_workspace_buffer
        if captures:
            assert not wrapper.planner.given
            assert not plan.any()
        else:
            chunk, chunks = (plan[begin:].view(torch.int32) for begin in (16, BLOCKS))
            assert chunks[: bs * topk].tolist() == (-(-row.diff() // chunk[0])).tolist()


def test_one_plan_is_made_for_all_passes_of_a_draft_where_one_holds() -> None:
    """Whatever the length: a plan takes the CPU time that a short step does not have."""
    planned = {length: _plans_of_a_draft([length], passes=4) for length in range(1, 40)}
    # where a length is of one chunk in the first pass and of two in the last, no size of chunks does for both
    crossing = range(CHUNK - 3, CHUNK)
    assert all(all(planned[length]) for length in crossing)
    assert all(each[0] <= 2 and not any(each[1:]) for length, each in planned.items() if length not in crossing)


def _plans_of_a_draft(lens: list[int], passes: int) -> list[int]:
    """How many each pass has had."""
    backends = [FlashInferAttnBackend() for _ in range(passes)]
    for backend in backends:
        backend.decode_cuda_graph_metadata[len(lens)] = [Wrapper(len(lens))]
        backend.decode_cuda_graph_metadata[len(lens)][0].plan()
    attention: Any = SimpleNamespace(attn_backends=backends, topk=1, init_forward_metadata_out_graph=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_plans, "_fill_drafts", lambda *_: None)
        host = torch.tensor(lens)
        batch = SimpleNamespace(batch_size=len(lens), seq_lens=host, seq_lens_cpu=host)
        draft_plans.DraftSteps(attention, Lengths())(batch)
    return [len(each.decode_cuda_graph_metadata[len(lens)][0].planner.given) for each in backends]


def test_a_plan_is_made_once_the_one_before_was_copied() -> None:
    turns, order = planning.Turns(), []
    for number in range(3):
        with turns.next():
            order.append((number, turns._copied and turns._copied.waited))
    assert order == [(0, None), (1, 1), (2, 1)]


@pytest.mark.parametrize("why", ["no length on the CPU", "eager", "another planner", "without tensor cores"])
def test_what_cannot_be_planned_so_is_planned_by_upstream(why: str) -> None:
    backend = FlashInferAttnBackend()
    updater = backend.indices_updater_decode
    planning.plan_decodes(backend, Lengths())
    wrapper = Wrapper(2)
    wrapper.is_cuda_graph_enabled = why != "eager"
    wrapper._backend = "fa3" if why == "another planner" else "fa2"
    wrapper.use_tensor_cores = why != "without tensor cores"
    update(updater, wrapper, [4, 5], host=why != "no length on the CPU", kind="decode")
    assert updater.calls == 2
    assert not wrapper.planner.given


def test_other_backends_and_sliding_windows_are_left_alone() -> None:
    windowed, plain = FlashInferAttnBackend(), object()
    windowed.dispatch_reason = "sliding window"
    for each in (windowed, plain, None):
        planning.plan_verification(each, 4, Lengths(), chain=True)
        draft_plans.plan_drafts(each, Lengths())
    assert "update" not in vars(windowed.indices_updater_prefill)


def test_upstream_has_what_is_replaced() -> None:
    tree = ast.parse(SOURCE.read_text())
    said = {each.name: ast.unparse(each) for each in tree.body if isinstance(each, ast.ClassDef)}
    for name in ("dispatch_reason", "enable_deterministic", "_create_prefill_wrappers", "decode_cuda_graph_metadata"):
        assert f"self.{name}" in said["FlashInferAttnBackend"]
    for name in ("FlashInferIndicesUpdaterPrefill", "FlashInferIndicesUpdaterDecode"):
        assert "self.update = self.update_single_wrapper" in said[name]
    for name in ("generate_draft_decode_kv_indices", "pool_len", "cuda_graph_kv_indices", "page_size"):
        assert f"self.{name}" in said["FlashInferMultiStepDraftBackend"]
