"""What SGLang's control routes may be sent: strict schemas of their bodies, a class a route.

Upstream's accept what looks like a number or a truth value, and let any through that no type of theirs bounds; what
then fails does so in the scheduler. Fields that are not here are passed over, as upstream does; a test holds every
field of upstream's to be here.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*$")]
Name = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Names = Annotated[list[Name], Meta(max_length=100_000)]
Size = Annotated[int, Meta(ge=0, le=2**40)]
Step = Annotated[int, Meta(ge=0, le=2**53)]
Rank = Annotated[int, Meta(ge=1, le=2**16)]
Port = Annotated[int, Meta(ge=1, le=2**16 - 1)]
Digits = Annotated[str, Meta(pattern=r"^[0-9]{1,5}$")]
"""Trainers send a port as a text, which upstream takes for a number."""
Selector = Text | None


class Control(msgspec.Struct, kw_only=True):
    """Of every body. Where an answer goes is the server's own affair."""

    rid: Text | None = None
    http_worker_ipc: None = None


class Pause(Control, kw_only=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(Control, kw_only=True):
    torch_empty_cache: bool = True


class Abort(Control, kw_only=True):
    abort_all: bool = False
    finished_reason: dict[Text, str | int | None] | None = None
    abort_message: Text | None = None


class BeginUpdate(msgspec.Struct):
    selector: Selector = None
    allow_partial: bool = False


class UpdateVersion(Control, kw_only=True):
    new_version: Text
    abort_all_requests: bool = True


class _Update(Control, kw_only=True):
    weight_version: Text | None = None
    flush_cache: bool = True
    torch_empty_cache: bool = False
    selector: Selector = None


class UpdateFromDisk(_Update, kw_only=True):
    model_path: Name
    load_format: Name | None = None
    abort_all_requests: bool = False
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: Step = 0
    manifest: dict[str, Any] | None = None


class UpdateFromTensor(_Update, kw_only=True):
    serialized_named_tensors: Annotated[list[bytes], Meta(min_length=1, max_length=2**16)]
    load_format: Name | None = None
    abort_all_requests: bool = False
    disable_draft_model: bool | None = None


class UpdateFromDistributed(_Update, kw_only=True):
    names: Names
    dtypes: Names
    shapes: Annotated[list[Annotated[list[Size], Meta(max_length=8)]], Meta(max_length=100_000)]
    group_name: Name = "weight_update_group"
    abort_all_requests: bool = False
    load_format: Name | None = None

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            counts = f"{len(self.names)}, {len(self.dtypes)} and {len(self.shapes)}"
            raise ValueError(f"names, dtypes and shapes must be of one length: they have {counts}")


class UpdateFromIpc(_Update, kw_only=True):
    zmq_handles: dict[Name, Name]


class InitGroup(Control, kw_only=True):
    """The server's ranks come after the trainer's: as rank 0 it would wait for others itself."""

    master_address: Name
    master_port: Port | Digits
    rank_offset: Rank
    world_size: Annotated[int, Meta(ge=2, le=2**16)]
    group_name: Name = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"

    def __post_init__(self) -> None:
        if self.rank_offset >= self.world_size:
            raise ValueError(f"rank_offset {self.rank_offset} must be below world_size {self.world_size}")


class DestroyGroup(Control, kw_only=True):
    group_name: Name = "weight_update_group"


class GetWeights(Control, kw_only=True):
    name: Name
    truncate_size: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 100


class CheckWeights(Control, kw_only=True):
    action: Name = "checksum"
    allow_quant_error: bool = False


class Memory(Control, kw_only=True):
    tags: Annotated[list[Name], Meta(max_length=16)] | None = None


class _State(msgspec.Struct, forbid_unknown_fields=True):
    pp_max_micro_batch_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class SetState(Control, kw_only=True):
    """The only setting that changes no sample."""

    server_args: _State


class Logging(Control, kw_only=True):
    """Where requests are written is said at start, not by who can reach the port."""

    log_requests: bool | None = None
    log_requests_level: Annotated[int, Meta(ge=0, le=3)] | None = None
    log_requests_format: Literal["text", "json"] | None = None
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    dump_requests_folder: None = None
    dump_requests_threshold: None = None
    crash_dump_folder: None = None
    dump_requests_exclude_meta_keys: None = None


class _Function(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class ParseFunctionCall(Control, kw_only=True):
    text: str
    tools: Annotated[list[_Tool], Meta(max_length=1024)] = []
    tool_call_parser: Name | None = None


class SeparateReasoning(Control, kw_only=True):
    text: str
    reasoning_parser: Name
    return_blocks: bool = False


class Profile(Control, kw_only=True):
    """One that ends by itself: a trace without an end fills the memory."""

    num_steps: Annotated[int, Meta(ge=1, le=1000)]
    req_type: Literal[1] = 1
    output_dir: Name | None = None
    start_step: Step | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: Name | None = None
    merge_profiles: bool = False
    profile_prefix: Name | None = None
    profile_stages: list[Literal["prefill", "decode"]] | None = None


class LoadAdapter(Control, kw_only=True):
    lora_name: Name
    lora_path: Name
    pinned: bool = False
    lora_id: None = None


class UnloadAdapter(Control, kw_only=True):
    lora_name: Name
    lora_id: None = None


BODIES: dict[str, type[msgspec.Struct]] = {
    "/pause_generation": Pause,
    "/continue_generation": Continue,
    "/abort_request": Abort,
    "/begin_weight_update": BeginUpdate,
    "/update_weight_version": UpdateVersion,
    "/update_weights_from_disk": UpdateFromDisk,
    "/update_weights_from_tensor": UpdateFromTensor,
    "/update_weights_from_distributed": UpdateFromDistributed,
    "/update_weights_from_ipc": UpdateFromIpc,
    "/init_weights_update_group": InitGroup,
    "/destroy_weights_update_group": DestroyGroup,
    "/get_weights_by_name": GetWeights,
    "/weights_checker": CheckWeights,
    "/release_memory_occupation": Memory,
    "/resume_memory_occupation": Memory,
    "/set_internal_state": SetState,
    "/configure_logging": Logging,
    "/parse_function_call": ParseFunctionCall,
    "/separate_reasoning": SeparateReasoning,
    "/start_profile": Profile,
    "/load_lora_adapter": LoadAdapter,
    "/unload_lora_adapter": UnloadAdapter,
}
"""By path, whatever the method."""
