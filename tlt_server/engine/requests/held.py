"""Requests of a scheduler that is held between two steps, of which none will be till it goes on.

Upstream does hardly anything to a scheduler that has requests, and lets them run until they end. Here they are
retracted, and prefilled anew when they go on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

from tlt_server.engine.requests.aborts import names


@contextmanager
def set_aside(scheduler: Any) -> Iterator[None]:
    """Inside, a scheduler is idle, between two steps; afterwards the requests that it had wait in its queue.

    Running ones are retracted with the tokens that they have; whether generation is paused stays as it is. The queue is
    put aside too, since to upstream a scheduler whose requests wait is not idle, though they hold no KV entry.
    """
    paused = scheduler._engine_paused
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    # override: retracting pauses; whether generation is paused stays as it was
    scheduler._engine_paused = paused
    queues = (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
    waiting = [list(queue) for queue in queues]
    for queue in queues:
        queue.clear()
    try:
        yield
    finally:
        for queue, requests in zip(queues, waiting, strict=True):
            queue.extend(requests)


def flush_under_load(scheduler: Any, *, empty_cache: bool) -> None:
    """Empties prefix cache and KV pool of a scheduler, between two steps; upstream flushes an idle one only.
    empty_cache: whether the device's allocator gives back what it holds."""
    with set_aside(scheduler):
        flushed = scheduler.flush_cache(empty_cache=empty_cache)
    if not flushed:
        raise RuntimeError("SGLang did not flush a cache that no request uses")


def all_answered(scheduler: Any) -> bool:
    """Whether every request has had its answer, though a step that overlapped the last may still be under way. Trainers
    flush once they have the last answer, some once only, and upstream refuses it during that step."""
    if scheduler.waiting_queue or scheduler.grammar_manager.grammar_queue or scheduler.chunked_req is not None:
        return False
    batches = (scheduler.running_batch, scheduler.last_batch)
    return all(req.finished() for batch in batches if batch is not None for req in batch.reqs)


def queue_what_ends(scheduler: Any, abort: AbortReq) -> None:
    """Puts the requests that are to be aborted in the queue, where upstream ends them at once. Running ones it would
    let run one more step, those whose grammar is being compiled a prefill."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    if any(names(abort, req) for batch in batches if batch is not None for req in batch.reqs):
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    compiling = scheduler.grammar_manager.grammar_queue
    scheduler.waiting_queue.extend(req for req in compiling if names(abort, req))
    compiling[:] = [req for req in compiling if not names(abort, req)]
