"""SGLang's kernels around the graphs of a step, compiled before the server answers.

Triton compiles a kernel when it is first called with other constants. Of these kernels constants are an arm's numbers,
or a batch's size up to the next power of two: all requests would wait for a compiler at the first step with each arm,
and each time that a batch has become half as large.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from tlt_server.config import Arm


def compile_kernels(worker: Any, captured: Mapping[Arm, int], largest: int) -> None:
    """Calls each as a step does, with place 0 of the pools, and no request there.

    worker: upstream's, with its pools. captured: the largest batch of each arm. largest: of any step.
    """
    from sglang.kernels.ops.speculative.cache_locs import (
        assign_draft_cache_locs_contiguous,
        assign_extend_cache_locs_uniform_func,
    )
    from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func
    from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

    table, device = worker.req_to_token_pool.req_to_token, worker.device
    for bs in _powers(largest):
        lens = torch.zeros(bs, dtype=torch.int32, device=device)
        assign_req_to_token_pool_func(_places(bs, device), table, lens, lens, _places(1, device), bs)
    one = _places(1, device)
    for arm, most in captured.items():
        assign_extend_cache_locs_uniform_func(one, table, one, 1, arm.num_draft_tokens, device)
        if arm.of_history:
            continue
        drafts = _places(arm.topk * arm.num_steps, device)
        assign_draft_cache_locs_contiguous[(1,)](one, table, one, drafts, table.shape[1], arm.topk, arm.num_steps)
        for bs in _powers(most) if arm.topk > 1 else ():
            nodes = _places(bs * arm.num_draft_tokens, device)
            batch = SimpleNamespace(
                seq_lens=_places(bs, device),
                req_pool_indices=_places(bs, device),
                req_to_token_pool=worker.req_to_token_pool,
                out_cache_loc=nodes,
            )
            accepted = torch.full((bs, arm.path), -1, dtype=torch.int32, device=device)
            none = torch.zeros(bs, dtype=torch.int32, device=device)
            move_accept_tokens_to_target_kvcache(batch, accepted, none, worker.token_to_kv_pool_allocator)


def _powers(most: int) -> Iterator[int]:
    """Of two, until all sizes up to `most` are rounded up to one."""
    size = 1
    while size < 2 * most:
        yield size
        size *= 2


def _places(count: int, device: Any) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)
