"""A batch whose text cannot be made, through the socket that its answers take."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.managers.io_struct import AbortReq, BatchEmbeddingOutput, FreezeGCReq, sock_recv

from tlt_server.engine.requests.outputs import detokenize


@pytest.fixture
def ends() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    taking, sending = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    sending.connect(f"tcp://127.0.0.1:{taking.bind_to_random_port('tcp://127.0.0.1')}")
    taking.rcvtimeo = 5000
    yield taking, sending
    context.destroy(linger=0)


def failing(message: Any) -> Any:
    raise IndexError(message.rids if hasattr(message, "rids") else message)


def batch(rids: list[str]) -> BatchEmbeddingOutput:
    fields: Any = {name: [] for name in BatchEmbeddingOutput.__struct_fields__}
    return BatchEmbeddingOutput(**fields | {"rids": rids, "http_worker_ipcs": None})


def test_what_cannot_be_decoded_ends_its_requests_alone(ends: tuple[Any, Any]) -> None:
    taking, sending = ends
    manager = SimpleNamespace(_request_dispatcher=failing, decode_status={"a": 1, "c": 2}, send_to_tokenizer=sending)
    assert detokenize(manager, batch(["a", "b"])) is None
    for rid in ("a", "b"):
        answer = sock_recv(taking)
        assert isinstance(answer, AbortReq)
        assert answer.rid == rid
        assert answer.finished_reason is not None
        assert answer.finished_reason["status_code"] == 500
    assert manager.decode_status == {"c": 2}


def test_another_message_that_fails_is_passed_over() -> None:
    manager = SimpleNamespace(_request_dispatcher=failing, decode_status={})
    assert detokenize(manager, FreezeGCReq()) is None
