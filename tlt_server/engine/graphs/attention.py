"""Attention in the CUDA graphs of a step: by a kernel of ours, where SGLang's backend has flashinfer's.

flashinfer's takes tiles of 64 rows for the 28 of four queries of seven heads. And which block of it does what is
decided on the CPU before each replay, by each request's length: SGLang reads them back from the GPU for that, waits
meanwhile, and packs a mask in every step. Ours needs neither: a replay is told slots and lengths where they lie.

What is no graph's attends by flashinfer as before, and so does everything with sliding windows, or deterministically.
"""

from collections.abc import Callable
from typing import Any

import torch

from tlt_server.engine.graphs.workspace import flashinfer_backends


class Batch:
    """What the attention of a CUDA graph reads of its requests: slots and lengths, [bs] int64."""

    def __init__(self, bs: int, device: torch.device) -> None:
        self.requests, self.lens = torch.zeros(2, bs, dtype=torch.int64, device=device)

    def tell(self, requests: torch.Tensor, lens: torch.Tensor) -> None:
        """Before a replay."""
        torch._foreach_copy_([self.requests, self.lens], [requests, lens])


class Queries:
    """Stands in for flashinfer's wrapper of a CUDA graph: equally many queries of each request of a batch.

    table: [slots, width] int32: the places of a slot's tokens. ahead: keys of each that its length does not count.
    mask: [bs or 1, queries, words] int64: a bit for each key ahead, whether a query sees it; None: those up to its own.
    """

    def __init__(self, table: torch.Tensor, batch: Batch, ahead: int = 0, mask: torch.Tensor | None = None) -> None:
        self.table, self.batch, self.ahead, self.mask = table, batch, ahead, mask

    def forward(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        *,
        sm_scale: float,
        logits_soft_cap: float | None,
        k_scale: float | None,
        v_scale: float | None,
        causal: bool = True,
        window_left: int = -1,
    ) -> torch.Tensor:
        """As flashinfer's."""
        from tlt_server.engine.graphs.attention_kernels import attend  # with triton, which a CPU does without

        if not causal or window_left >= 0:
            raise NotImplementedError(f"causal={causal}, window_left={window_left}: try --attention-backend triton")
        scale = sm_scale * (1.0 if k_scale is None else k_scale)
        of_values = 1.0 if v_scale is None else v_scale
        batch, cap = self.batch, logits_soft_cap or 0.0
        return attend(q, cache, self.table, batch.requests, batch.lens, self.ahead, scale, self.mask, cap, of_values)


def rows_of(q: torch.Tensor, wrapper: Any) -> torch.Tensor:
    """Queries [tokens, heads * dim] as the attention of a wrapper reads them: ours where they lie, beside keys and
    values; flashinfer's in rows of their own."""
    return q if isinstance(wrapper, Queries) and q.dim() == 2 and q.stride(1) == 1 else q.contiguous()


def attend_verification(attention: Any, verified: int, *, chain: bool) -> None:
    """Verification of so many tokens of each request, which are a chain or a tree."""
    for backend in replaceable(attention):
        _replace_prefills(backend, verified, masked=not chain)


def attend_extends(attention: Any) -> None:
    """Draft-extend, whose tokens lengths count."""
    for backend in replaceable(attention):
        _replace_prefills(backend, 0, masked=False)


def attend_decodes(attention: Any) -> None:
    """Decoding of one token for each request, which lengths count."""
    for backend in replaceable(attention):
        updater = backend.indices_updater_decode
        table = updater.req_to_token
        # override: flashinfer's kernels wait for plans that the CPU makes
        backend._create_decode_wrappers = lambda bs, _, table=table: [Queries(table, Batch(bs, table.device))]
        # override: likewise
        updater.update = _telling(updater.update, "decode_wrappers")


def attend_drafts(attention: Any) -> None:
    """The drafter's passes of one step, a backend for each. In pages of several tokens branches lie otherwise."""
    if replaceable(attention) and (attention.topk == 1 or attention.page_size == 1):
        # override: flashinfer's kernels wait for a plan for each pass
        attention.init_forward_metadata_out_graph = Drafts(attention)


class Drafts:
    """Stands in for the method `init_forward_metadata_out_graph` of SGLang's draft backend. In pass i a branch sees its
    request's tokens and i + 1 of its own, which lie where those of each branch do, one branch after another."""

    def __init__(self, attention: Any) -> None:
        self._attention, self._batches = attention, dict[int, Batch]()
        table = attention.req_to_token_pool.req_to_token
        for number, backend in enumerate(attention.attn_backends):
            ahead, mask = number + 1, None
            if attention.topk > 1:
                ahead = attention.topk * attention.speculative_num_steps
                mask = _own(attention.topk, attention.speculative_num_steps, number + 1).to(table.device)

            def create(bs: int, *_: Any, ahead: int = ahead, mask: torch.Tensor | None = mask) -> list[Queries]:
                return [Queries(table, self._batches[bs], ahead, mask)]

            # override: as in attend_decodes
            backend._create_decode_wrappers = create

    def __call__(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As upstream's."""
        bs = forward_batch.batch_size
        if in_capture:
            from sglang.srt.model_executor.forward_batch_info import ForwardMode

            self._batches[bs] = Batch(bs, forward_batch.seq_lens.device)
            for backend in self._attention.attn_backends:
                backend._prepare_cuda_graph_metadata(bs, bs, ForwardMode.DECODE, forward_batch.spec_info)
        self._batches[bs].tell(forward_batch.req_pool_indices[:bs], forward_batch.seq_lens[:bs])


def replaceable(attention: Any) -> list[Any]:
    """Its flashinfer backends, if all of their attention can be ours."""
    found = flashinfer_backends(attention)
    return [] if any(each.dispatch_reason is not None or each.enable_deterministic for each in found) else found


def _own(branches: int, steps: int, taken: int) -> torch.Tensor:
    """[1, branches, words] int64: each branch sees so many of its own tokens, of `steps`."""
    sees = torch.zeros(branches, branches, steps, dtype=torch.bool)
    sees[range(branches), range(branches), :taken] = True
    return packed(sees.view(1, branches, -1))


def packed(sees: torch.Tensor) -> torch.Tensor:
    """[..., keys] bool as [..., words] int64, the first of 64 keys in the lowest bit."""
    words = torch.nn.functional.pad(sees, (0, -sees.shape[-1] % 64)).unflatten(-1, (-1, 64)).long()
    return (words << torch.arange(64, device=sees.device)).sum(-1)


def _replace_prefills(backend: Any, ahead: int, *, masked: bool) -> None:
    updater = backend.indices_updater_prefill
    table = updater.req_to_token

    def create(bs: int, *_: Any, **__: Any) -> list[Queries]:
        mask = packed(torch.ones(bs, ahead, ahead, dtype=torch.bool, device=table.device)) if masked else None
        return [Queries(table, Batch(bs, table.device), ahead, mask)]

    # override: as in attend_decodes; a chain needs no mask, for which upstream keeps a buffer in each graph
    backend._create_prefill_wrappers = create
    # override: likewise
    updater.update = _telling(updater.update, "prefill_wrappers")


def _telling(upstream: Callable[..., None], kind: str) -> Callable[..., None]:
    """Stands in for the method `update` of SGLang's index updater, which is used for whatever is no graph's."""

    def update(requests: Any, seq_lens: Any, *others: Any, **named: Any) -> None:
        wrappers = named.get(kind) or [None]
        if not isinstance(queries := wrappers[0], Queries):
            upstream(requests, seq_lens, *others, **named)
            return
        queries.batch.tell(requests, seq_lens)
        if queries.mask is not None:
            from tlt_server.engine.graphs.attention_kernels import collect_tails

            collect_tails(named["spec_info"].custom_mask, queries.mask, queries.batch.lens, queries.ahead)

    return update
