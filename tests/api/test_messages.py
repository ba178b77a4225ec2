"""Messages to a scheduler and from it: what cannot be read or made ends one request."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import (
    BatchEmbeddingOutput,
    HealthCheckOutput,
    TokenizedGenerateReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from tlt_server.api.messages import sendable, take

MANAGER = SimpleNamespace(server_args=SimpleNamespace(dp_size=2))
PARAMS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "min_p",
    "n",
    "json_schema",
    "logit_bias",
    "custom_params",
    "ignore_eos",
)
FIELDS = (
    "priority",
    "extra_key",
    "return_logprob",
    "token_ids_logprob",
    "routed_dp_rank",
    "input_embeds",
    "session_id",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def request(**fields: Any) -> TokenizedGenerateReqInput:
    whole: Any = {
        "input_text": "",
        "input_ids": array("q", [5]),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    return TokenizedGenerateReqInput(**whole | fields)


@pytest.mark.slow
@settings(max_examples=500)
@given(st.sampled_from(PARAMS + FIELDS), JSON)
def test_what_is_sent_can_be_read(name: str, value: Any) -> None:
    """Upstream makes these messages of what a client sent, and checks no type until the scheduler reads them."""
    message = request()
    setattr(message.sampling_params if name in PARAMS else message, name, value)
    try:
        sent = sendable(MANAGER, message)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - upstream's routes take any ValueError for a client's fault
    else:
        assert msgpack_decode(msgpack_encode(sent)).rid == message.rid


@pytest.mark.parametrize("rank", [-1, 2, 2**40])
def test_a_replica_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"routed_dp_rank {rank}: this server has replicas 0 to 1"):
        sendable(MANAGER, request(routed_dp_rank=rank))


class Manager:
    """Upstream's, as far as `take` knows it: whatever it is handed fails."""

    def __init__(self) -> None:
        self.rid_to_state = {rid: SimpleNamespace(obj=SimpleNamespace(return_logprob=True)) for rid in "abc"}
        self.aborted: list[str] = []
        self.answered: dict[str, Any] = {}

    async def _handle_batch_output(self, message: Any) -> None:
        raise KeyError(message.rids[0])

    def _result_dispatcher(self, message: Any) -> None:
        raise ValueError(message)

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    def _handle_abort_req(self, message: Any) -> None:
        assert not self.rid_to_state.pop(message.rid).obj.return_logprob
        self.answered[message.rid] = message.finished_reason["status_code"]


def test_an_answer_that_cannot_be_made_ends_its_request_alone() -> None:
    manager = Manager()
    fields: Any = {name: [] for name in BatchEmbeddingOutput.__struct_fields__}
    asyncio.run(take(manager, BatchEmbeddingOutput(**fields | {"rids": ["a", "b", "gone"]})))
    assert manager.answered == {"a": 500, "b": 500}
    assert manager.aborted == ["a", "b"]
    assert set(manager.rid_to_state) == {"c"}


def test_another_message_that_fails_is_passed_over() -> None:
    asyncio.run(take(Manager(), HealthCheckOutput()))
