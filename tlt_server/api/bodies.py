"""What SGLang's control routes may be sent: strict schemas of their bodies, made of upstream's messages.

Upstream's accept what looks like a number or a truth value, and let any through that no type of theirs bounds; what
then fails does so in the scheduler. Names that no message has are passed over, as upstream does.
"""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import NODEFAULT, Meta
from sglang.srt.managers import io_struct

Text = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*$")]
Name = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Names = Annotated[list[Name], Meta(max_length=100_000)]
Size = Annotated[int, Meta(ge=0, le=2**40)]
Step = Annotated[int, Meta(ge=0, le=2**53)]
Few = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class _State(msgspec.Struct, forbid_unknown_fields=True):
    """The only setting that changes no sample."""

    pp_max_micro_batch_size: Few


class _Function(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


KINDS: Mapping[Any, Any] = {
    **{bool: bool, bool | None: bool | None},
    **{str: Name, str | None: Name | None},
}
"""By upstream's type. Another one needs a bound by its field's name."""
FIELDS: Mapping[str, Any] = {
    **dict.fromkeys(("rid", "weight_version", "selector", "abort_message"), Text | None),
    "new_version": Text,
    "text": str,
    # the server's own affair: where an answer goes, where requests are written, how an adapter is called within
    **dict.fromkeys(("http_worker_ipc", "dump_requests_folder", "dump_requests_threshold"), None),
    **dict.fromkeys(("crash_dump_folder", "dump_requests_exclude_meta_keys", "lora_id"), None),
    "mode": Literal["abort", "retract", "in_place"],
    "finished_reason": dict[Text, str | int | None] | None,
    "token_step": Step,
    "manifest": dict[str, Any] | None,
    "serialized_named_tensors": Annotated[list[bytes], Meta(min_length=1, max_length=2**16)],
    **dict.fromkeys(("names", "dtypes"), Names),
    "shapes": Annotated[list[Annotated[list[Size], Meta(max_length=8)]], Meta(max_length=100_000)],
    "zmq_handles": dict[Name, Name],
    # trainers send a port as a text, which upstream takes for a number
    "master_port": Annotated[int, Meta(ge=1, le=2**16 - 1)] | Annotated[str, Meta(pattern=r"^[0-9]{1,5}$")],
    # the server's ranks come after the trainer's: as rank 0 it would wait for others itself
    "rank_offset": Annotated[int, Meta(ge=1, le=2**16)],
    "world_size": Annotated[int, Meta(ge=2, le=2**16)],
    "backend": Literal["nccl", "gloo"],
    "truncate_size": Few,
    "tags": Annotated[list[Name], Meta(max_length=16)] | None,
    "server_args": _State,
    "log_requests_level": Annotated[int, Meta(ge=0, le=3)] | None,
    "log_requests_format": Literal["text", "json"] | None,
    "log_level": Literal["debug", "info", "warning", "error", "critical"] | None,
    "tools": Annotated[list[_Tool], Meta(max_length=1024)],
    "num_steps": Annotated[int, Meta(ge=1, le=1000)],  # a trace without an end fills the memory
    "req_type": Literal[1],
    "start_step": Step | None,
    "activities": list[Literal["CPU", "GPU"]] | None,
    "profile_stages": list[Literal["prefill", "decode"]] | None,
}
"""By name, whatever the message."""


def body_of(message: str, rule: Callable[[Any], None] | None = None) -> type[msgspec.Struct]:
    """The schema of a message of upstream's, with bounds; `rule` raises ValueError for fields that do not go together.

    A field that may not be null has no null for a default either.

    Raises TypeError: nothing says what bounds one of its fields.
    """
    fields: list[Any] = []
    for field in msgspec.structs.fields(getattr(io_struct, message)):
        if field.name not in FIELDS and field.type not in KINDS:
            raise TypeError(f"{message}.{field.name} has no bound: give it one in FIELDS")
        kind = FIELDS[field.name] if field.name in FIELDS else KINDS[field.type]
        required = field.required or (field.default is None and kind is not None and NoneType not in get_args(kind))
        default = msgspec.field(default_factory=field.default_factory) if field.default is NODEFAULT else field.default
        fields.append((field.name, kind, *(() if required else (default,))))
    return msgspec.defstruct(message, fields, kw_only=True, namespace={"__post_init__": rule} if rule else None)


def _one_length(body: Any) -> None:
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        counts = f"{len(body.names)}, {len(body.dtypes)} and {len(body.shapes)}"
        raise ValueError(f"names, dtypes and shapes must be of one length: they have {counts}")


def _within_world(body: Any) -> None:
    if body.rank_offset >= body.world_size:
        raise ValueError(f"rank_offset {body.rank_offset} must be below world_size {body.world_size}")


BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/pause_generation": body_of("PauseGenerationReqInput"),
    "/continue_generation": body_of("ContinueGenerationReqInput"),
    "/abort_request": body_of("AbortReq"),
    "/begin_weight_update": msgspec.defstruct(
        "BeginUpdate", [("selector", Text | None, None), ("allow_partial", bool, False)]
    ),
    "/post_process_weights": msgspec.defstruct(
        "PostProcess", [("restore_weights_before_load", bool, False), ("post_process_quantization", bool, False)]
    ),
    "/pull_weights": msgspec.defstruct(
        "Pull", [("local_checkpoint_dir", Name), ("source_dir", Name), ("target_version", Step)]
    ),
    "/update_weight_version": body_of("UpdateWeightVersionReqInput"),
    "/update_weights_from_disk": body_of("UpdateWeightFromDiskReqInput"),
    "/update_weights_from_tensor": body_of("UpdateWeightsFromTensorReqInput"),
    "/update_weights_from_distributed": body_of("UpdateWeightsFromDistributedReqInput", _one_length),
    "/update_weights_from_ipc": body_of("UpdateWeightsFromIPCReqInput"),
    "/init_weights_update_group": body_of("InitWeightsUpdateGroupReqInput", _within_world),
    "/destroy_weights_update_group": body_of("DestroyWeightsUpdateGroupReqInput"),
    "/get_weights_by_name": body_of("GetWeightsByNameReqInput"),
    "/weights_checker": body_of("CheckWeightsReqInput"),
    "/release_memory_occupation": body_of("ReleaseMemoryOccupationReqInput"),
    "/resume_memory_occupation": body_of("ResumeMemoryOccupationReqInput"),
    "/set_internal_state": body_of("SetInternalStateReq"),
    "/configure_logging": body_of("ConfigureLoggingReq"),
    "/parse_function_call": body_of("ParseFunctionCallReq"),
    "/separate_reasoning": body_of("SeparateReasoningReqInput"),
    "/start_profile": body_of("ProfileReq"),
    "/load_lora_adapter": body_of("LoadLoRAAdapterReqInput"),
    "/unload_lora_adapter": body_of("UnloadLoRAAdapterReqInput"),
}
"""By path, whatever the method."""
