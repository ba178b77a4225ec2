"""One request's own fault ends that request: what a scheduler is sent of it is checked, and what fails is answered.

Upstream lets an exception of any message end the process, and with it the server. Ranks of a group are sent the same
messages and fail alike; the first of them answers.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    ProfileReq,
    ProfileReqOutput,
    SetInternalStateReq,
    SetInternalStateReqOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReqInput,
)

from tlt_server.engine.requests.continued import GENERATED, generated_tokens
from tlt_server.engine.requests.ranges import FLOAT32, INT32, INT64

logger = logging.getLogger(__name__)

BATCHES = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)
REQUESTS = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
OF_THE_REQUEST = (ValueError, TypeError, ArithmeticError, LookupError, AssertionError, RecursionError)
"""What goes wrong where a request asks for what cannot be; anything else is a fault of ours."""
FAILED: Mapping[type, Callable[[str], Any]] = {
    FlushCacheReqInput: lambda why: FlushCacheReqOutput(success=False, message=why),
    CheckWeightsReqInput: lambda why: CheckWeightsReqOutput(success=False, message=why),
    GetWeightsByNameReqInput: lambda _: GetWeightsByNameReqOutput(parameter=None),
    SetInternalStateReq: lambda _: SetInternalStateReqOutput(updated=False),
    ProfileReq: lambda why: ProfileReqOutput(success=False, message=why),
    LoadLoRAAdapterReqInput: lambda why: LoRAUpdateOutput(success=False, error_message=why),
    UnloadLoRAAdapterReqInput: lambda why: LoRAUpdateOutput(success=False, error_message=why),
}
"""Answers of the kinds that whoever asked waits for; without one it would wait for ever. Updates have their own
(engine/weights/routing.py); nobody waits for those of the rest."""


def handle(scheduler: Any, recv_req: Any) -> Any:
    """Upstream's answer to a message, if any, or what failed: the edge beyond which an exception ends the server."""
    if isinstance(recv_req, BATCHES):
        for each in recv_req:
            if (answer := handle(scheduler, each)) is not None:
                scheduler.ipc_channels.send_to_tokenizer.send_output(answer, each)
        return None
    try:
        if isinstance(recv_req, REQUESTS):
            check(recv_req, scheduler.model_config)
        return scheduler._request_dispatcher(recv_req)
    except Exception as error:
        if isinstance(recv_req, REQUESTS):
            return ended(str(recv_req.rid), error)
        logger.exception("%s failed", type(recv_req).__name__)
        answer = FAILED.get(type(recv_req))
        return answer and answer(f"{type(error).__name__}: {error}")


def ended(rid: str, error: Exception) -> AbortReq:
    """The end of one request that cannot be served."""
    asked = isinstance(error, OF_THE_REQUEST)
    logger.log(logging.INFO if asked else logging.ERROR, "request %s ends: it failed", rid, exc_info=error)
    status = HTTPStatus.BAD_REQUEST if asked else HTTPStatus.INTERNAL_SERVER_ERROR
    message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return AbortReq(rid=rid, finished_reason={"type": "abort", "message": message, "status_code": int(status)})


def check(recv_req: Any, model: Any) -> None:
    """Refuses what would fail where requests are one batch, and so fail them all. recv_req: from a tokenizer worker,
    its types those that upstream declares. model: upstream's `ModelConfig`. Raises ValueError: it names the field."""
    known = range(model.vocab_size)
    if not recv_req.input_ids and not getattr(recv_req, "input_embeds", None):
        raise ValueError("the prompt is empty: a model needs a token to go on from")
    if recv_req.mm_inputs is None and recv_req.input_ids:
        _within("input_ids", (min(recv_req.input_ids), max(recv_req.input_ids)), known)
    _check_sampling(recv_req.sampling_params, known)
    _within(GENERATED, (generated_tokens(recv_req.sampling_params),), range(max(len(recv_req.input_ids or ()), 1)))
    if isinstance(recv_req, TokenizedGenerateReqInput):
        _within("token_ids_logprob", recv_req.token_ids_logprob or (), known)
        _within("top_logprobs_num", (recv_req.top_logprobs_num,), range(model.vocab_size + 1))
        _within("logprob_start_len", (recv_req.logprob_start_len,), range(-1, INT32.stop))
        _check_embeddings(recv_req.input_embeds, model.hidden_size)
    _within("token_type_ids", recv_req.token_type_ids or (), INT32)
    _within("priority", (recv_req.priority or 0,), INT64)


def _check_sampling(params: Any, known: range) -> None:
    """What becomes a tensor of all requests of a batch."""
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        _finite(name, (getattr(params, name),))
    for name in ("top_k", "min_new_tokens", "max_new_tokens", "n"):
        _within(name, (getattr(params, name) or 0,), INT32)
    if params.sampling_seed is None:
        raise ValueError("sampling_seed: none, and each request is given one where it comes in")
    _within("sampling_seed", (params.sampling_seed,), INT64)
    _within("stop_token_ids", params.stop_token_ids or (), known)
    _within("stream_interval", (params.stream_interval or 1,), range(1, INT32.stop))
    _within("logit_bias", map(int, params.logit_bias or ()), known)
    _finite("logit_bias", (params.logit_bias or {}).values())


def _check_embeddings(rows: list[list[float]] | None, width: int) -> None:
    for row in rows or ():
        if len(row) != width:
            raise ValueError(f"input_embeds has a row of {len(row)} numbers: the model's are {width} wide")
        _finite("input_embeds", row)


def _within(name: str, values: Iterable[int], allowed: range) -> None:
    for value in values:
        if not allowed.start <= value < allowed.stop:
            raise ValueError(f"{name}: {value} must be at least {allowed.start} and below {allowed.stop}")


def _finite(name: str, values: Iterable[float]) -> None:
    for value in values:
        if not abs(value) <= FLOAT32:
            raise ValueError(f"{name}: {value} must be finite in 32 bits")
