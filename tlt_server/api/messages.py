"""Between the HTTP process and the schedulers: what is sent can be read there, and what comes back ends no process."""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import AbortReq, BaseBatchReq, msgpack_decode, msgpack_encode

from tlt_server.engine.requests.intake import BATCHES, REQUESTS

logger = logging.getLogger(__name__)

OPAQUE = ("time_stats", "mm_inputs", "mm_data_mooncake")
"""Of our own making, and pickled on the way; of the rest, types are declared, and upstream checks them nowhere."""


def sendable(manager: Any, message: Any) -> Any:
    """The message, once each value is known to be of its field's type: one that is not would end a scheduler. Raises
    ValueError: a request's value has no place in its field; upstream answers with status 400."""
    replicas = manager.server_args.dp_size
    for each in message if isinstance(message, BATCHES) else (message,) if isinstance(message, REQUESTS) else ():
        plain = msgspec.structs.replace(each, **{name: None for name in OPAQUE if hasattr(each, name)})
        try:
            msgpack_decode(msgpack_encode(plain))
        except (msgspec.MsgspecError, OverflowError, TypeError, RecursionError) as error:
            raise ValueError(f"a value that its field cannot hold: {error}") from error
        if each.routed_dp_rank is not None and not 0 <= each.routed_dp_rank < replicas:
            raise ValueError(f"routed_dp_rank {each.routed_dp_rank}: this server has replicas 0 to {replicas - 1}")
    return message


async def take(manager: Any, message: Any) -> None:
    """Upstream's handling of what comes back; requests whose answer cannot be made end with 500, and no others."""
    try:
        if isinstance(message, BaseBatchReq):
            await manager._handle_batch_output(message)
        else:
            manager._result_dispatcher(message)
    except Exception as error:
        logger.exception("%s failed", type(message).__name__)
        rids = (message.rids or ()) if isinstance(message, BaseBatchReq) else (message.rid,)
        for rid in rids:
            _end(manager, rid, f"its answer cannot be made: {type(error).__name__}: {error}")


def _end(manager: Any, rid: str, why: str) -> None:
    state = manager.rid_to_state.get(rid)
    if state is None:
        return
    state.obj.return_logprob = False  # what cannot be made is most often these
    reason = {"type": "abort", "message": why, "status_code": int(HTTPStatus.INTERNAL_SERVER_ERROR)}
    manager.abort_request(rid)
    manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))
