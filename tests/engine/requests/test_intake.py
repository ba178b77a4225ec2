"""What one request asks for ends that request: nothing of it reaches a batch, and the scheduler goes on."""

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from tlt_server.engine.requests.intake import check, handle

VOCAB, WIDTH = 512, 4
MODEL = SimpleNamespace(vocab_size=VOCAB, hidden_size=WIDTH)
FIELDS: dict[str, Any] = {
    "input_text": "",
    "input_ids": array("q", [5, 6]),
    "input_embeds": None,
    "mm_inputs": None,
    "token_type_ids": None,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "stream": False,
}


def request(params: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    sampling = SamplingParams(**{"max_new_tokens": 4, "sampling_seed": 7} | (params or {}))
    return TokenizedGenerateReqInput(rid="a", sampling_params=sampling, **FIELDS | fields)


class Scheduler:
    """Upstream's, as far as `handle` knows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.model_config, self.admitted, self.sent = MODEL, [], []
        self._error = error
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=self)

    def send_output(self, output: Any, _: Any) -> None:
        self.sent.append(output)

    def _request_dispatcher(self, message: Any) -> None:
        if self._error is not None:
            raise self._error
        self.admitted.append(message)


UNFIT = {
    "input_ids": {"input_ids": array("q", [VOCAB])},
    "no token at all": {"input_ids": array("q")},
    "a negative token": {"input_ids": array("q", [-1])},
    "token_ids_logprob": {"token_ids_logprob": [VOCAB]},
    "top_logprobs_num": {"top_logprobs_num": VOCAB + 1},
    "logprob_start_len": {"logprob_start_len": -2},
    "the width of embeddings": {"input_embeds": [[0.5] * (WIDTH + 1)]},
    "embeddings that are not numbers": {"input_embeds": [[math.nan] * WIDTH]},
}
UNFIT_PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": math.inf},
    "top_k": {"top_k": 2**31},
    "max_new_tokens": {"max_new_tokens": 2**31},
    "sampling_seed": {"sampling_seed": 2**63},
    "no sampling_seed": {"sampling_seed": None},
    "more generated tokens than ids": {"custom_params": {"generated_tokens": 2}},
    "a negative count of generated tokens": {"custom_params": {"generated_tokens": -1}},
    "stop_token_ids": {"stop_token_ids": {VOCAB}},
    "stream_interval": {"stream_interval": -1},
    "a key of logit_bias": {"logit_bias": {str(VOCAB): 1.0}},
    "a word in logit_bias": {"logit_bias": {"word": 1.0}},
    "a value of logit_bias": {"logit_bias": {"5": math.nan}},
}


@pytest.mark.parametrize("unfit", [*(request(**UNFIT[k]) for k in UNFIT), *map(request, UNFIT_PARAMS.values())])
def test_what_would_fail_in_a_batch_is_answered_400(unfit: TokenizedGenerateReqInput) -> None:
    scheduler = Scheduler()
    answer = handle(scheduler, unfit)
    assert isinstance(answer, AbortReq)
    assert answer.rid == "a"
    assert answer.finished_reason is not None
    assert answer.finished_reason["status_code"] == 400
    assert not scheduler.admitted


def test_what_is_fit_is_admitted() -> None:
    scheduler = Scheduler()
    assert handle(scheduler, request({"logit_bias": {"5": -100.0}, "top_k": 1 << 30, "sampling_seed": 7})) is None
    assert handle(scheduler, request(input_ids=None, input_embeds=[[0.5] * WIDTH])) is None
    assert len(scheduler.admitted) == 2


def test_of_a_batch_the_unfit_alone_end() -> None:
    scheduler = Scheduler()
    batch = [request(), request(top_logprobs_num=-1), request()]
    assert handle(scheduler, BatchTokenizedGenerateReqInput(batch=batch)) is None
    assert len(scheduler.admitted) == 2
    assert [answer.finished_reason["status_code"] for answer in scheduler.sent] == [400]


@pytest.mark.parametrize(
    ("error", "status"), [(TypeError("unhashable"), 400), (KeyError(3), 400), (OSError("disk"), 500)]
)
def test_an_exception_at_intake_ends_its_request_alone(error: Exception, status: int) -> None:
    answer = handle(Scheduler(error), request())
    assert answer.finished_reason["status_code"] == status
    assert str(error) in answer.finished_reason["message"]


def test_a_control_message_that_fails_is_answered() -> None:
    answer = handle(Scheduler(RuntimeError("no cache")), FlushCacheReqInput())
    assert not answer.success
    assert "no cache" in answer.message


@settings(max_examples=300)
@given(
    st.sampled_from(
        ["temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "n", "sampling_seed"]
    ),
    st.one_of(st.integers(), st.floats(), st.sampled_from([2**31, 2**63, -(2**63) - 1])),
)
def test_what_passes_fits_its_tensor(name: str, value: float) -> None:
    """Of floats and of 32 and 64 bits, as upstream makes them for a batch."""
    import torch

    wanted = request()
    setattr(wanted.sampling_params, name, value)
    types = {"temperature": torch.float, "top_p": torch.float, "min_p": torch.float, "sampling_seed": torch.int64}
    try:
        check(wanted, MODEL)
    except ValueError:
        return
    tensor = torch.tensor([getattr(wanted.sampling_params, name)], dtype=types.get(name, torch.int32))
    assert torch.isfinite(tensor.double()).all()
