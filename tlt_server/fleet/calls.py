"""The routes of both dialects, by what the front does with them, and what it changes in the body of a control call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tlt_server.errors import BadRequest
from tlt_server.fleet.transaction import Kind

SAMPLED = frozenset(
    {
        *("/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/invocations"),
        *("/v1/messages", "/encode", "/classify", "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank"),
    }
)
"""Computed by the weights."""
TOKENIZED = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
        *("/parse_function_call", "/separate_reasoning"),
    }
)
"""Without the weights: answered whatever is under way."""
ABORTS = frozenset({"/abort_request", "/abort_requests", "/inference/v1/abort_requests"})
OF_ONE = frozenset(
    {
        *("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/version"),
        *("/is_sleeping", "/tlt/v1/drafter", "/tlt/v1/strategy", "/tlt/v1/strategy/learned"),
        "/tlt/v1/history",
    }
)
"""Reads that any ready member answers for all: which model they serve was compared before they were ready."""


class Call(NamedTuple):
    """A control route. undo: the route, and its body, that takes it back. kept: a late joiner is told it, too."""

    kind: Kind
    undo: tuple[str, bytes] | None = None
    kept: bool = False


_PLAIN, _WRITE, _SETTING = Call(Kind.PLAIN), Call(Kind.WRITE), Call(Kind.PLAIN, kept=True)
CONTROL: Mapping[tuple[str, str], Call] = {
    ("POST", "/pause_generation"): Call(Kind.PAUSE, ("/continue_generation", b"{}")),
    ("POST", "/continue_generation"): Call(Kind.RESUME),
    ("POST", "/begin_weight_update"): Call(Kind.OPEN, ("/end_weight_update", b"")),
    ("POST", "/end_weight_update"): Call(Kind.CLOSE),
    ("POST", "/update_weights_from_disk"): _WRITE,
    ("POST", "/update_weights_from_tensor"): _WRITE,
    ("POST", "/update_weights_from_distributed"): _WRITE,
    ("POST", "/update_weight_version"): Call(Kind.NAME),
    ("POST", "/init_weights_update_group"): Call(Kind.GROUP, ("/destroy_weights_update_group", b"")),
    ("POST", "/destroy_weights_update_group"): Call(Kind.LEAVE),
    ("GET", "/flush_cache"): _PLAIN,
    ("POST", "/flush_cache"): _PLAIN,
    ("POST", "/release_memory_occupation"): _PLAIN,
    ("POST", "/resume_memory_occupation"): _PLAIN,
    ("POST", "/weights_checker"): _PLAIN,
    ("POST", "/load_lora_adapter"): _PLAIN,
    ("POST", "/unload_lora_adapter"): _PLAIN,
    ("POST", "/pause"): Call(Kind.PAUSE, ("/resume", b"")),
    ("POST", "/resume"): Call(Kind.RESUME),
    ("POST", "/sleep"): Call(Kind.PAUSE, ("/wake_up", b"")),
    ("POST", "/wake_up"): Call(Kind.RESUME),
    ("POST", "/start_weight_update"): Call(Kind.OPEN, ("/finish_weight_update", b"")),
    ("POST", "/update_weights"): _WRITE,
    ("POST", "/finish_weight_update"): Call(Kind.CLOSE),
    ("POST", "/init_weight_transfer_engine"): Call(Kind.GROUP, ("/shutdown_weight_transfer_engine", b"")),
    ("POST", "/shutdown_weight_transfer_engine"): Call(Kind.LEAVE),
    ("POST", "/reset_prefix_cache"): _PLAIN,
    ("POST", "/collective_rpc"): _PLAIN,
    ("PUT", "/tlt/v1/strategy"): _SETTING,
    ("PUT", "/tlt/v1/strategy/learned"): _PLAIN,
    ("POST", "/tlt/v1/drafter/update"): _SETTING,
    ("POST", "/tlt/v1/drafter/rollback"): _PLAIN,
    ("POST", "/tlt/v1/drafter/freeze"): _SETTING,
    ("PUT", "/tlt/v1/drafter/watchdog"): _SETTING,
    ("POST", "/tlt/v1/history"): _PLAIN,
    ("DELETE", "/tlt/v1/history"): _PLAIN,
}
METHODS = {
    "skyrl_start_weight_update": Call(Kind.OPEN),
    "update_weights_nccl": _WRITE,
    "skyrl_finish_weight_update": Call(Kind.CLOSE),
}
"""Of `/collective_rpc`."""
OF_A_GROUP = frozenset({"/update_weights_from_distributed", "/update_weights", "/collective_rpc"})
"""Writes that the trainer broadcasts: without the members of its group, a broadcast would not end."""


NAMED_BY_CALL = frozenset(
    {
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
        "/finish_weight_update",
    }
)
"""Calls whose body may name the weights."""


class Said(msgspec.Struct):
    """What the front reads of a control call's body."""

    weight_version: str | None = None
    new_version: str | None = None
    model_path: str | None = None
    weight_dir: str | None = None
    method: str | None = None
    rank_offset: int | None = None
    init_info: dict[str, Any] | None = None
    group_name: str | None = None


def said(body: bytes) -> Said:
    """Raises BadRequest: the body is not an object, or one of these fields is of another type."""
    if not body.strip():
        return Said()
    try:
        return msgspec.json.decode(body, type=Said)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body of a control call is a JSON object: {error}") from error


def called(method: str, path: str, told: Said) -> Call | None:
    """None: no control route."""
    found = CONTROL.get((method, path))
    return METHODS.get(told.method or "", found) if path == "/collective_rpc" and found else found


def broadcast(path: str, told: Said) -> bool:
    """Whether the trainer sends what this call receives to a group of ranks."""
    if path == "/collective_rpc":
        return told.method == "update_weights_nccl"
    return path in OF_A_GROUP and told.weight_dir is None


def name_of(told: Said) -> str | None:
    """What the call names the weights."""
    return told.new_version or told.weight_version


def folder_of(path: str, told: Said) -> str | None:
    """The folder that a write reads; None: what it writes comes otherwise."""
    return told.model_path if path == "/update_weights_from_disk" else told.weight_dir


def for_ranks(body: bytes, told: Said, worlds: Sequence[int]) -> list[bytes]:
    """The body for each member of a group in turn, whose ranks follow one another. Raises BadRequest: no offset."""
    given: dict[str, Any] = msgspec.json.decode(body)
    where = given["init_info"] if told.init_info is not None else given
    first = where.get("rank_offset")
    if not isinstance(first, int) or isinstance(first, bool):
        raise BadRequest("rank_offset: must be a number, of the fleet's first rank in the group")
    bodies = []
    for index in range(len(worlds)):
        where["rank_offset"] = first + sum(worlds[:index])
        bodies.append(msgspec.json.encode(given))
    return bodies


def naming(body: bytes, version: str) -> bytes:
    """A JSON object with the name in it: decoding one that holds tensors would take long."""
    head = (body.strip() or b"{}").removesuffix(b"}").rstrip()
    return head + (b"" if head.endswith(b"{") else b",") + b'"weight_version":' + msgspec.json.encode(version) + b"}"


def merged(path: str, answers: Sequence[bytes], quarantined: Sequence[str]) -> bytes:
    """The answer for the trainer: the first member's, and who was quarantined. RPC's results are of all ranks."""
    if not quarantined and path != "/collective_rpc":
        return answers[0]
    try:
        given = [msgspec.json.decode(answer) for answer in answers]
    except msgspec.MsgspecError:  # SGLang answers some calls in plain text
        return answers[0]
    first = given[0]
    if not isinstance(first, dict):
        return answers[0]
    if path == "/collective_rpc" and all(isinstance(each.get("results"), list) for each in given):
        first["results"] = [result for each in given for result in each["results"]]
    if quarantined:
        first["quarantined"] = list(quarantined)
    return msgspec.json.encode(first)


def under(path: str, routes: frozenset[str]) -> bool:
    """Whether a path is one of these, or a read of one entry below, as /v1/models/NAME."""
    return path in routes or str(Path(path).parent) in routes
