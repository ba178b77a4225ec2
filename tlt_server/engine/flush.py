"""Emptying the prefix cache while requests are running: they are retracted, and prefilled anew when they go on."""

from typing import Any

from sglang.srt.managers.io_struct import PauseGenerationReqInput


def flush_under_load(scheduler: Any, *, empty_cache: bool) -> None:
    """Empties prefix cache and KV pool of a scheduler, between two steps.

    Upstream flushes an idle scheduler only. Here its running requests go back to the queue with the tokens that they
    have; whether generation is paused stays as it is. The queue is put aside meanwhile, since to upstream a scheduler
    whose requests wait is not idle, though they hold no KV entry.

    Args:
        scheduler: upstream's.
        empty_cache: whether the device's allocator gives back what it holds.
    """
    paused = scheduler._engine_paused
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    scheduler._engine_paused = paused
    queues = (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
    waiting = [list(queue) for queue in queues]
    for queue in queues:
        queue.clear()
    flushed = scheduler.flush_cache(empty_cache=empty_cache)
    for queue, requests in zip(queues, waiting, strict=True):
        queue.extend(requests)
    if not flushed:
        raise RuntimeError("SGLang did not flush a cache that no request uses")
