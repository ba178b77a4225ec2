"""What a detokenizer cannot decode ends the requests that it belongs to, not the process."""

import logging
from typing import Any

from sglang.srt.managers.io_struct import BaseBatchReq, sock_send

from tlt_server.engine.requests.intake import ended

logger = logging.getLogger(__name__)


def detokenize(manager: Any, recv_obj: Any) -> Any:
    """Upstream's answer to a message of a scheduler's: the edge beyond which an exception ends the server. Some
    requests of the batch may have been decoded a step further when it failed, so none of them can go on."""
    try:
        return manager._request_dispatcher(recv_obj)
    except Exception as error:
        logger.exception("%s failed", type(recv_obj).__name__)
        if isinstance(recv_obj, BaseBatchReq):
            workers = recv_obj.http_worker_ipcs or [None] * len(recv_obj.rids or ())
            for rid, worker in zip(recv_obj.rids or (), workers, strict=True):
                manager.decode_status.pop(rid, None)
                answer = ended(rid, RuntimeError(f"its text cannot be decoded: {error}"))
                if worker is None:
                    sock_send(manager.send_to_tokenizer, answer)
                else:
                    answer.http_worker_ipc = worker
                    manager.socket_mapping.send_output(worker, answer, is_tokenizer=True)
        return None
