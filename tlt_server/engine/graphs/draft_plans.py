"""One plan for all of the drafter's passes of a step, as planning.py makes them.

A pass of a draft is decoding of one token for each branch, and flashinfer wants a plan for each, whose making may take
the CPU longer than the pass takes the GPU. But passes differ by one key of each branch, and a plan mostly holds for all
of them, as lengths.py says: it is made once, and copied on the GPU to where each pass has its own.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tlt_server.engine.graphs.lengths import Lengths
from tlt_server.engine.graphs.planning import Turns, ends_of, is_planned, plan, plannable

PADDED, VALID = 0, 12
"""Of flashinfer's `PrefillPlanInfo`: how many blocks a plan has, used or not; where it says which are used."""


def plan_drafts(attention: Any, lengths: Lengths) -> None:
    """The drafter's passes of one step, a backend for each."""
    if plannable(attention):
        # override: as in plan_verification, once for all passes of a draft
        attention.init_forward_metadata_out_graph = DraftSteps(attention, lengths)


class DraftSteps:
    """Stands in for the method `init_forward_metadata_out_graph` of SGLang's draft backend. In pass i a branch sees its
    request's tokens and i + 1 of its own."""

    def __init__(self, attention: Any, lengths: Lengths) -> None:
        self._attention, self._upstream = attention, attention.init_forward_metadata_out_graph
        self._lengths, self._turns = lengths, Turns()

    def __call__(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As upstream's."""
        attention, bs = self._attention, forward_batch.batch_size
        host, slack = forward_batch.seq_lens_cpu, 0
        if host is None and (most := self._lengths.most(bs)) is not None:
            host, slack = most, self._lengths.slack
        if in_capture or host is None or not is_planned(attention.attn_backends[0].decode_cuda_graph_metadata[bs][0]):
            self._upstream(forward_batch, in_capture=in_capture)
            return
        _fill_drafts(attention, forward_batch)
        with self._turns.next():
            if not self._plan(host[:bs], slack):
                self._plan(forward_batch.seq_lens[:bs].to("cpu"), 0)  # waits for the GPU

    def _plan(self, host: torch.Tensor, slack: int) -> bool:
        """All passes; False: no plan holds for all lengths. host: [bs] int."""
        backends = self._attention.attn_backends
        wrappers = [each.decode_cuda_graph_metadata[len(host)][0] for each in backends]
        updater, passes = backends[0].indices_updater_decode, torch.arange(1, len(backends) + 1)
        lens = (host.repeat_interleave(self._attention.topk) + passes[:, None]).to(torch.int32)
        ends = ends_of(lens)
        first, *others = wrappers
        if others and plan(updater, first, lens[-1], ends[-1], 1, slack + len(others)):
            _copy_plan(first, others)
            return True
        return all(
            plan(updater, wrapper, of_pass, end, 1, slack)
            for wrapper, of_pass, end in zip(wrappers, lens, ends, strict=True)
        )


def _copy_plan(first: Any, others: Sequence[Any]) -> None:
    """To where kernels of other wrappers read theirs, for as many requests and queries."""
    info = first._plan_info
    used = -(-(int(info[VALID]) + int(info[PADDED])) // 16) * 16  # the mask of valid blocks is the last of a plan
    made = first._int_workspace_buffer[:used]
    torch._foreach_copy_([each._int_workspace_buffer[:used] for each in others], [made] * len(others))


def _fill_drafts(attention: Any, forward_batch: Any) -> None:
    """Writes the places and the offsets of all passes of a draft, by SGLang's kernel."""
    from sglang.srt.utils import next_power_of_2

    steps, topk, bs = attention.speculative_num_steps, attention.topk, forward_batch.batch_size
    places = attention.cuda_graph_kv_indices
    attention.generate_draft_decode_kv_indices[(steps, bs, topk)](
        forward_batch.req_pool_indices,
        attention.req_to_token_pool.req_to_token,
        forward_batch.seq_lens,
        places,
        attention.kv_indptr,
        forward_batch.positions,
        attention.pool_len,
        places.shape[1],
        attention.kv_indptr.shape[1],
        next_power_of_2(bs),
        next_power_of_2(steps),
        next_power_of_2(bs * topk),
        attention.page_size,
    )
