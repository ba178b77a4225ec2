"""SGLang's HTTP dialect, both ways: what goes into a /generate body, and what its answers mean.

Read off SGLang 0.5.17: `GenerateReqInput`, `TokenizerManager` and the exception handlers of its HTTP server.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tlt_client import errors
from tlt_client.rollouts import DrafterSpan, FinishReason, Rollout, SpecCounts, TargetSpan
from tlt_client.sampling import SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids: any sequence whose items are integers (a list, a numpy array)."""

Logprob = tuple[float | None, int, str | None]
"""Logprob, token id, the token's text where it was asked for."""

Fields = Mapping[str, Any] | msgspec.Struct
"""Of a JSON body."""

T = TypeVar("T")

WEIGHT_VERSION, TARGET_VERSION = "X-TLT-Weight-Version", "X-TLT-Target-Version"
"""Headers of a request that only certain weights may sample: by the trainer's name for them, by tlt-server's number."""
SEED, PLACES = "X-TLT-Seed", "X-TLT-Places"
"""Headers: a request's seed, where its body gives none, below 2**53; each prompt's place in the batch that is split."""

_OURS = ("text", "input_ids", "sampling_params", "return_logprob", "rid", "stream")
_MAX_MESSAGE = 500


# -- requests -------------------------------------------------------------------------------------------------------


def generate_fields(
    prompt: Prompt, sampling: SamplingParams, logprobs: bool, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The body of a /generate request for one sample, still without `rid` and `stream`."""
    fields = dict(extra or {})
    if clash := [name for name in _OURS if name in fields]:
        raise errors.InvalidArgument(f"extra holds {clash}, which have arguments of their own")
    if isinstance(prompt, str):
        fields["text"] = prompt
    else:
        fields["input_ids"] = token_ids(prompt)
    fields["sampling_params"] = sampling
    if logprobs:
        fields["return_logprob"] = True
    encode(fields)  # what JSON cannot carry is the caller's mistake: say so before anything is sent
    return fields


def headers_for(version: str | int | None) -> dict[str, str]:
    """What says that a request needs these weights: a name (str) or a target version (int)."""
    if version is None:
        return {}
    if isinstance(version, int):
        return {TARGET_VERSION: str(version)}
    if not version or not version.isascii() or not version.isprintable():
        raise errors.InvalidArgument(f"version={version!r}: a header carries printable ASCII only")
    return {WEIGHT_VERSION: version}


def token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        tokens = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise errors.InvalidArgument(
            f"a prompt is a string or a sequence of token ids, not {type(prompt).__name__} ({error}); "
            "several prompts go to generate_batch"
        ) from error
    if not tokens or min(tokens) < 0:
        raise errors.InvalidArgument(f"a prompt of token ids needs at least one, none negative; got {tokens[:8]}")
    return tokens


def given(**fields: Any) -> dict[str, Any]:
    """Those that are not None: of what is left out the server's default stands."""
    return {name: value for name, value in fields.items() if value is not None}


def update_fields(weight_version: str | None, flush_cache: bool, **fields: Any) -> dict[str, Any]:
    """The body of an update of the target."""
    return {**fields, "flush_cache": flush_cache} | given(weight_version=weight_version)


def encode(fields: Fields) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"the request cannot be written as JSON: {error}") from error


# -- answers --------------------------------------------------------------------------------------------------------


class Finish(FinishReason, frozen=True):
    status_code: int | None = None


class Meta(msgspec.Struct):
    id: str
    completion_tokens: int
    finish_reason: Finish | None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: str | None = None
    seed: int | None = None
    weight_versions: tuple[TargetSpan, ...] = ()
    drafter_versions: tuple[DrafterSpan, ...] = ()
    ignored: tuple[str, ...] = ()
    output_token_logprobs: list[Logprob] | None = None
    spec_accept_length: float | None = None
    spec_verify_ct: int | None = None
    # 0.5.17's names, and those that trainers know from before; the fork sends both.
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_accept_token_num: int | None = None
    spec_draft_token_num: int | None = None


class StreamFailure(msgspec.Struct):
    message: str
    code: int = 500


class Answer(msgspec.Struct):
    """A /generate response, or one event of a streamed one."""

    meta_info: Meta | None = None
    output_ids: list[int] | None = None
    text: str | None = None
    error: StreamFailure | None = None


class ReplicaLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int


class WeightVersion(msgspec.Struct):
    """A /get_weight_version response."""

    weight_version: str


class Loads(msgspec.Struct):
    """A /v1/loads response."""

    loads: list[ReplicaLoad]


def decode(kind: type[T], body: bytes, path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.ProtocolError(f"{path} answered what cannot be read: {error}; it begins {body[:80]!r}") from error


def read_answer(body: bytes) -> tuple[Answer, Meta, list[int]]:
    """Checks one answer; raises what it reports: an error event, or a rollout that the server ended by an error."""
    answer = decode(Answer, body, "/generate")
    if answer.error is not None:
        raise refusal(answer.error.code, answer.error.message, "/generate")
    if answer.meta_info is None or answer.output_ids is None:
        absent = "meta_info" if answer.meta_info is None else "output_ids"
        raise errors.ProtocolError(f"/generate answered without `{absent}`; it begins {body[:80]!r}")
    finish = answer.meta_info.finish_reason
    if finish is not None and (finish.status_code or 0) >= 400:
        raise refusal(finish.status_code or 0, finish.message or "aborted by the server", "/generate")
    return answer, answer.meta_info, answer.output_ids


def read_rollout(body: bytes, logprobs: bool, resamples: int) -> Rollout:
    """A whole /generate response for one sample."""
    answer, meta, tokens = read_answer(body)
    values = logprobs_of(meta.output_token_logprobs, tokens) if logprobs else None
    return build_rollout(meta, tuple(tokens), answer.text or "", values, resamples)


def logprobs_of(entries: list[Logprob] | None, tokens: list[int]) -> tuple[float, ...]:
    """The values alone, once it is sure that they are those of `tokens`."""
    if not tokens:
        return ()  # with max_new_tokens=0 there is an entry for the token that was not kept
    if entries is None:
        raise errors.ProtocolError("meta_info has no `output_token_logprobs`, though logprobs were asked for")
    if [token for _, token, _ in entries] != tokens:
        raise errors.ProtocolError(f"the {len(entries)} `output_token_logprobs` are not of the {len(tokens)} tokens")
    values = tuple(value for value, _, _ in entries if value is not None)
    if len(values) != len(tokens):
        raise errors.ProtocolError("`output_token_logprobs` holds null, which is how the server writes NaN or infinity")
    return values


def build_rollout(
    meta: Meta, tokens: tuple[int, ...], text: str, logprobs: tuple[float, ...] | None, resamples: int
) -> Rollout:
    finish = meta.finish_reason
    if finish is None:
        raise errors.ProtocolError("`meta_info.finish_reason` is null in a whole answer")
    if meta.prompt_tokens is None and finish.type != "abort":
        raise errors.ProtocolError("meta_info has no `prompt_tokens`")
    if meta.completion_tokens != len(tokens):
        raise errors.ProtocolError(f"`completion_tokens` is {meta.completion_tokens}, but {len(tokens)} tokens came")
    return Rollout(
        rid=meta.id,
        tokens=tokens,
        text=text,
        logprobs=logprobs,
        finish_reason=FinishReason(finish.type, finish.matched, finish.length, finish.message),
        prompt_tokens=meta.prompt_tokens or 0,
        completion_tokens=meta.completion_tokens,
        cached_tokens=meta.cached_tokens,
        weight_version=meta.weight_version,
        seed=meta.seed,
        weight_versions=meta.weight_versions,
        drafter_versions=meta.drafter_versions,
        accept_length=_accept_length(meta),
        spec=_spec_counts(meta),
        ignored=meta.ignored,
        resamples=resamples,
    )


def _accept_length(meta: Meta) -> float | None:
    if meta.spec_accept_length is None and meta.spec_verify_ct:
        return meta.completion_tokens / meta.spec_verify_ct
    return meta.spec_accept_length


def _spec_counts(meta: Meta) -> SpecCounts | None:
    accepted = meta.spec_accept_token_num if meta.spec_num_correct_drafts is None else meta.spec_num_correct_drafts
    proposed = meta.spec_draft_token_num if meta.spec_num_proposed_drafts is None else meta.spec_num_proposed_drafts
    if meta.spec_verify_ct is None or accepted is None or proposed is None:
        return None
    return SpecCounts(meta.spec_verify_ct, accepted, proposed)


# -- refusals -------------------------------------------------------------------------------------------------------

_BY_STATUS: dict[int, type[errors.TltClientError]] = {
    401: errors.Unauthorized,
    403: errors.Unauthorized,
    409: errors.VersionConflict,
    499: errors.Aborted,
    # A proxy lost its server on the way, or lost patience: the request may well be running.
    502: errors.ConnectionLost,
    503: errors.ServerUnavailable,
    504: errors.ConnectionLost,
}


def refusal(status: int, message: str, path: str) -> errors.TltClientError:
    """The error that a status stands for."""
    kind = _BY_STATUS.get(status)
    if kind is None and status < 400:
        kind = errors.ProtocolError
    elif kind is None:
        kind = errors.BadRequest if status < 500 else errors.ServerError
    if status == 503 and "running timeout" in message:
        # SGLANG_REQ_RUNNING_TIMEOUT: sampled, and thrown away because it was long. Drawn again until it is short enough
        # it would bias lengths, so this 503 is not one to retry.
        kind = errors.Timeout
    return kind(f"{path} answered {status}: {message}", status)


class Complaint(msgspec.Struct):
    msg: str
    loc: list[str | int] = []

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.loc))}: {self.msg}"


class Saying(msgspec.Struct):
    message: str


class ErrorBody(msgspec.Struct):
    """`error` is OpenAI's shape, `message` SGLang's own, `detail` FastAPI's."""

    error: Saying | str | None = None
    message: str | None = None
    detail: list[Complaint] | str | None = None


def message_of(body: bytes) -> str:
    """What the body of an error response says."""
    try:
        said = msgspec.json.decode(body, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = ErrorBody()  # a proxy's page, say
    error = said.error.message if isinstance(said.error, Saying) else said.error
    detail = "; ".join(map(str, said.detail)) if isinstance(said.detail, list) else said.detail
    text = error or said.message or detail or body.decode(errors="replace").strip()
    return text[:_MAX_MESSAGE] or "no reason given"
