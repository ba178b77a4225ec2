"""Aborted requests that do not run: answered with all they have, as those that run are.

Upstream answers one that waits by an echo of the abort, without the tokens it had before it was retracted and without
what a rollout's meta_info says; and one whose grammar is still being compiled by status 400.
"""

from concurrent.futures import Future
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import release_kv_cache


def answer_waiting(scheduler: Any, abort: AbortReq) -> None:
    """Takes the requests that an abort names out of a scheduler's queues, and answers them."""
    if scheduler.disaggregation_mode != DisaggregationMode.NULL:
        return  # what its queues hold besides is upstream's to release
    for queue in (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue):
        waiting = list(queue)
        queue[:] = [req for req in waiting if not names(abort, req)]
        for req in waiting:
            if names(abort, req):
                if isinstance(req.grammar, Future):
                    req.grammar.cancel()
                if scheduler.enable_hicache_storage:
                    scheduler.tree_cache.release_aborted_request(req.rid)
                if req.mamba_pool_idx is not None:
                    release_kv_cache(req, scheduler.tree_cache, is_insert=False)
                answer_aborted(scheduler, req)


def answer_aborted(scheduler: Any, req: Any) -> None:
    """Answers a request that is in no queue and no batch any more."""
    if not scheduler.is_generation:
        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
        return
    req.finished_reason = FINISH_ABORT()
    if req.time_stats.wait_queue_entry_time > 0:
        req.time_stats.set_forward_entry_time()  # else the time it waited comes out negative
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def names(abort: AbortReq, req: Any) -> bool:
    """Whether a request is one that an abort ends."""
    return bool(abort.abort_all or req.rid.startswith(abort.rid))
