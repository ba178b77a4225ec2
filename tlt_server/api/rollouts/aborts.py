"""Requests that no scheduler is sent, since nothing is left to sample: answered as rollouts that have nothing.

Of those that are aborted before, upstream answers with status 499, a whole batch where one of its requests was aborted;
and those that came while a pause waited for the ones before them, when the pause is over: a trainer that awaits them
before it goes on waits for ever. A prompt that fills the context, as of a rollout that was aborted just before its end
and is sent again to go on, upstream answers with status 400, which trainers take for a failure; one that may have no
token more with no token and, where it drafts, the logprob of one.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from tlt_server.api.rollouts.seeds import seed_of, seed_sample

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
FULL = {"type": "length", "length": 0}
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
    """What a scheduler is to get of some tokenized requests, each with its sample's seed: the others were aborted or
    have no room, and are answered."""
    wanted = []
    for each in tokenized:
        seed_sample(manager.rid_to_state[each.rid], each)
        if _aborted(manager, manager.child_rid_to_logical_rid.get(each.rid, each.rid)):
            _answer(manager, manager.rid_to_state[each.rid], each, ABORTED)
        elif _is_full(manager, each):
            _answer(manager, manager.rid_to_state[each.rid], each, FULL)
        else:
            wanted.append(each)
    return wanted


def _is_full(manager: Any, tokenized: Any) -> bool:
    """Whether a request has no room for a response, which is all that it asks for: what it asks of the prompt itself is
    upstream's to answer or to refuse."""
    if not manager.is_generation or tokenized.input_ids is None or tokenized.mm_inputs is not None:
        return False
    of_prompt = tokenized.return_logprob and (tokenized.logprob_start_len != -1 or tokenized.token_ids_logprob)
    if tokenized.return_hidden_states or of_prompt:
        return False
    # as it was asked: of a group upstream prefills the prompt first, by a request of its own for no token
    asked = manager.rid_to_state[tokenized.rid].obj.sampling_params or {}
    no_more = tokenized.return_logprob and asked.get("max_new_tokens") == 0
    full = len(tokenized.input_ids) >= manager.max_req_input_len and not manager.allow_auto_truncate
    return bool(no_more or full)


def _aborted(manager: Any, logical_rid: str) -> bool:
    state = manager.rid_to_state.get(logical_rid)
    return state is not None and state.abort_requested


def _answer(manager: Any, state: Any, tokenized: Any, finish_reason: dict[str, Any]) -> None:
    """Puts the answer where whoever waits for the request finds it; they remove its state."""
    state.finished = True
    state.time_stats.set_finished_time()
    meta_info = {
        "id": tokenized.rid,
        "finish_reason": dict(finish_reason),
        "prompt_tokens": len(tokenized.input_ids or ()),
        "cached_tokens": 0,
        "completion_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "weight_version": manager.config_value("weight_version"),
        "seed": seed_of(state),
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
