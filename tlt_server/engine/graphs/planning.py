"""Plans of flashinfer's for the CUDA graphs of a step, made from what the CPU knows, without waiting for the GPU.

Before a graph with attention in it is replayed, flashinfer decides on the CPU which block of a kernel does what: its
plan, which depends on each request's length. SGLang has flashinfer read the lengths back from the GPU, and pack a mask
in every step. Here the tables that kernels read are written where they lie, by two small kernels, and flashinfer's
planner is given the scheduler's lengths. A chain needs no mask; a tree's is packed where the kernel reads it.

What is not planned here is planned by SGLang as before: another backend's passes, eager ones (but for prefills,
prefills.py), sliding windows, and decoding without tensor cores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from tlt_server.engine.graphs.lengths import Lengths, chunk_for
from tlt_server.engine.graphs.workspace import flashinfer_backends


def plan_verification(attention: Any, verified: int, lengths: Lengths, *, chain: bool) -> None:
    """Verification of so many tokens of each request, which are a chain or a tree. lengths: of the batch, where a step
    is launched while the one before runs."""
    for backend in plannable(attention):
        if chain:
            # override: a chain needs no mask, for which upstream keeps a buffer in each graph
            backend._create_prefill_wrappers = partial(_maskless, backend._create_prefill_wrappers)
        updater = backend.indices_updater_prefill
        # override: upstream reads lengths back from the GPU, which waits meanwhile
        updater.update = ByLength(updater, lengths, rows=verified, ahead=verified, masked=not chain)


def plan_extends(attention: Any, rows: int, lengths: Lengths) -> None:
    """Draft-extend of so many tokens for each request."""
    for backend in plannable(attention):
        updater = backend.indices_updater_prefill
        # override: as in plan_verification
        updater.update = ByLength(updater, lengths, rows=rows, counted=rows)


def plan_decodes(attention: Any, lengths: Lengths) -> None:
    """Decoding of one token for each request."""
    for backend in plannable(attention):
        updater = backend.indices_updater_decode
        # override: as in plan_verification
        updater.update = ByLength(updater, lengths, rows=1, counted=1)


class ByLength:
    """Stands in for the method `update` of SGLang's two index updaters, where all requests have equally many queries.

    updater: SGLang's; its own method is used for whatever is no graph's wrapper, and for a wrapper's first plan.
    lengths: of the batch, for calls without lengths on the CPU.
    rows: queries of each request.
    ahead: tokens of each request that its length does not count yet. counted: that it counts beyond `lengths`.
    masked: `spec_info` says who sees whom.
    """

    def __init__(
        self, updater: Any, lengths: Lengths, rows: int, ahead: int = 0, counted: int = 0, masked: bool = False
    ) -> None:
        self._updater, self._rows, self._ahead, self._masked = updater, rows, ahead, masked
        self._lengths, self._counted = lengths, counted
        self._upstream, self._turns = updater.update, Turns()

    def __call__(self, requests: Any, seq_lens: Any, seq_lens_cpu: Any, seq_lens_sum: Any, **named: Any) -> None:
        """As upstream's: requests, seq_lens, [bs] int64 on the GPU; seq_lens_cpu the same on the CPU, or None."""
        wrappers = named.get("prefill_wrappers") or named.get("decode_wrappers")
        known, slack = seq_lens_cpu, 0
        if known is None and (most := self._lengths.most(len(seq_lens))) is not None:
            known, slack = most + self._counted, self._lengths.slack
        if known is None or not wrappers or not is_planned(wrappers[0]):
            self._upstream(requests, seq_lens, seq_lens_cpu, seq_lens_sum, **named)
            return
        (wrapper,) = wrappers
        counted = seq_lens + self._ahead if self._ahead else seq_lens
        torch.cumsum(counted, 0, dtype=torch.int32, out=wrapper._paged_kv_indptr_buf[1:])
        _fill(self._updater.req_to_token, requests, counted, wrapper)
        lens = (known + self._ahead).to(torch.int32)
        ends = ends_of(lens)
        if self._masked:
            _pack(named["spec_info"].custom_mask, counted, self._rows * int(ends[-1]), wrapper, self._rows)
        with self._turns.next():
            if not plan(self._updater, wrapper, lens, ends, self._rows, slack):
                lens = counted.to("cpu", torch.int32)  # waits for the GPU
                plan(self._updater, wrapper, lens, ends_of(lens), self._rows)


class Turns:
    """Lets a plan be made once the one before has left the memory that both are copied to the GPU from.

    SGLang waited for the GPU in every step, and so for that. Here nothing else does, and a GPU that another process
    uses too may be late.
    """

    def __init__(self) -> None:
        self._copied: Any = None

    @contextmanager
    def next(self) -> Iterator[None]:
        """Within, a plan is made."""
        if self._copied is not None:
            self._copied.synchronize()
        yield
        self._copied = _mark()


def plannable(attention: Any) -> list[Any]:
    """Its flashinfer backends, if all of them can be planned here."""
    found = flashinfer_backends(attention)
    return [] if any(each.dispatch_reason is not None or each.enable_deterministic for each in found) else found


def is_planned(wrapper: Any) -> bool:
    """Whether a wrapper is a graph's, has had its first plan, and is planned by what `plan` calls."""
    planned = getattr(wrapper, "_cached_module", None) is not None and wrapper._backend == "fa2"
    return planned and wrapper.is_cuda_graph_enabled and getattr(wrapper, "use_tensor_cores", True)


def _maskless(create: Callable[..., list[Any]], bs: int, *_: Any, **__: Any) -> list[Any]:
    """Wrappers without a buffer for masks, which then attend causally; they plan without the mask that SGLang has."""
    wrappers = create(bs, use_custom_mask=False)
    for wrapper in wrappers:
        # override: it would plan with the mask that upstream passes on all the same
        wrapper.begin_forward = partial(_plan_without_mask, wrapper.begin_forward)
    return wrappers


def _plan_without_mask(plan: Callable[..., None], *args: Any, **named: Any) -> None:
    plan(*args, **{**named, "custom_mask": None})


def ends_of(lens: torch.Tensor) -> torch.Tensor:
    """[..., n] int32 lengths to [..., n + 1] int32: where each begins, and where the last one ends."""
    ends = torch.zeros(*lens.shape[:-1], lens.shape[-1] + 1, dtype=torch.int32)
    torch.cumsum(lens, -1, dtype=torch.int32, out=ends[..., 1:])
    return ends


@cache
def _starts(bs: int, rows: int) -> torch.Tensor:
    """[bs + 1] int32, of each request's queries."""
    return torch.arange(bs + 1, dtype=torch.int32) * rows


def plan(updater: Any, wrapper: Any, lens: torch.Tensor, ends: torch.Tensor, rows: int, slack: int = 0) -> bool:
    """Plans for all lengths of `lens`, [n] int32, keys of each request or branch at most, that are shorter by up to
    `slack`; False: no plan holds for them all, and none was made that may be used. updater: knows the heads. ends:
    [n + 1] int32, of these keys. rows: queries of each."""
    _let_plan(updater, wrapper, lens, ends, rows)
    if not slack:
        return True
    chunk = _chunk(wrapper)
    wanted = chunk_for(lens.numpy(), slack, chunk)
    if wanted is not None and wanted != chunk:
        _let_plan(updater, wrapper, lens, ends, rows, wanted)
    return wanted is not None


def _let_plan(updater: Any, wrapper: Any, lens: torch.Tensor, ends: torch.Tensor, rows: int, chunk: int = -1) -> None:
    """flashinfer's planner: reads lengths on the CPU, and copies its plan to the GPU. chunk: keys of a chunk; -1: as
    flashinfer likes."""
    count = len(lens)
    # override: flashinfer's own plan() reads lengths back from the GPU
    wrapper._plan_info = wrapper._cached_module.plan(
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        _starts(count, rows),
        ends,
        lens,
        count * rows,
        count,
        updater.num_qo_heads,
        updater.num_kv_heads,
        1,  # tokens a page: SGLang hands flashinfer places of tokens
        True,  # for a CUDA graph
        updater.head_dim,
        updater.head_dim,  # of values
        False,  # causal: for this planner the same; a pass says itself whether it is
        -1,  # no window
        chunk,
        False,  # and may split
        0,  # no other kernels beside
    )


def _chunk(wrapper: Any) -> int:
    """Keys of a chunk, by the newest plan: where the planner has written them, PrefillPlanInfo's tenth."""
    begin = int(wrapper._plan_info[9])
    return int(wrapper._pin_memory_int_workspace_buffer[begin : begin + 4].view(torch.int32))


def _mark() -> Any:
    """An event at the end of what the GPU has to do now."""
    event = torch.cuda.Event()
    event.record()
    return event


def _fill(req_to_token: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, wrapper: Any) -> None:
    """Writes the places of the keys of a batch, [sum of lens], into a wrapper's buffer."""
    from sglang.srt.layers.attention.flashinfer_backend import create_flashinfer_kv_indices_triton

    create_flashinfer_kv_indices_triton[(len(requests),)](
        req_to_token,
        requests,
        lens,
        wrapper._paged_kv_indptr_buf,
        None,
        wrapper._paged_kv_indices_buf,
        req_to_token.shape[1],
    )


def _pack(mask: torch.Tensor, lens: torch.Tensor, bits: int, wrapper: Any, rows: int) -> None:
    """Packs who sees whom into a wrapper's buffer, 8 keys a byte; each request begins a byte.

    mask: [rows * keys of a request, one request after another] bool; without those that pad the batch. lens: [bs] int,
    keys of each. bits: of all of them.
    """
    if len(mask) < bits:
        mask = torch.cat((mask, mask.new_ones(bits - len(mask))))
    torch.cumsum((lens * rows + 7) >> 3, 0, dtype=torch.int32, out=wrapper._mask_indptr_buf[1:])
    starts = wrapper._paged_kv_indptr_buf * rows
    _packer().segment_packbits(mask, starts, wrapper._mask_indptr_buf, "little", wrapper._custom_mask_buf)


@cache
def _packer() -> Any:
    """flashinfer's kernels that pack bits; its own call of them waits for the GPU to say how many bytes there are."""
    from flashinfer.quantization.packbits import get_quantization_module

    return get_quantization_module()
