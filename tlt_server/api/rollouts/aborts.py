"""Requests that are aborted before a scheduler has them: answered as rollouts that have nothing yet.

Upstream answers them with status 499, a whole batch where one of its requests was aborted; and those that came while a
pause waited for the ones before them, when the pause is over: a trainer that awaits them before it goes on waits for
ever.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
"""As upstream's schedulers say it."""


def abort_asked(manager: Any, request: Any) -> bool:
    """Whether nothing of a request is to be sampled any more, so that it need not wait for the end of a pause."""
    return all(_aborted(manager, rid) for rid in manager._logical_rids(request))


def wake_held(manager: Any) -> None:
    """Lets the requests that wait for the end of a pause look again, once its caller has done what it is about to."""

    async def wake() -> None:
        async with manager.is_pause_cond:
            manager.is_pause_cond.notify_all()

    if manager.is_pause:
        waking = asyncio.create_task(wake())
        manager.asyncio_tasks.add(waking)
        waking.add_done_callback(manager.asyncio_tasks.discard)


def still_wanted(manager: Any, tokenized: Sequence[Any]) -> list[Any]:
    """What a scheduler is to get of some tokenized requests: the others were aborted, and are answered."""
    wanted = []
    for each in tokenized:
        if _aborted(manager, manager.child_rid_to_logical_rid.get(each.rid, each.rid)):
            _answer(manager, manager.rid_to_state[each.rid], each)
        else:
            wanted.append(each)
    return wanted


def _aborted(manager: Any, logical_rid: str) -> bool:
    state = manager.rid_to_state.get(logical_rid)
    return state is not None and state.abort_requested


def _answer(manager: Any, state: Any, tokenized: Any) -> None:
    """Puts the answer where whoever waits for the request finds it; they remove its state."""
    state.finished = True
    state.time_stats.set_finished_time()
    meta_info = {
        "id": tokenized.rid,
        "finish_reason": dict(ABORTED),
        "prompt_tokens": len(tokenized.input_ids or ()),
        "cached_tokens": 0,
        "completion_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "weight_version": manager.config_value("weight_version"),
        "e2e_latency": state.time_stats.get_e2e_latency(),
    }
    asked = state.obj
    if getattr(asked, "return_logprob", False):
        manager.add_logprob_to_meta_info(meta_info, state, asked.top_logprobs_num, asked.token_ids_logprob, False)
    output: dict[str, Any] = {"text": "", "output_ids": []} if hasattr(asked, "stream") else {"embedding": []}
    if state.prompt_token_ids is not None:
        output["prompt_token_ids"] = state.prompt_token_ids
    state.out_list.append(output | {"meta_info": meta_info})
    state.event.set()
