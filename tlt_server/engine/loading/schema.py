"""Names, shapes and dtypes of a checkpoint: what every update is held against before anything is written.

Upstream's loaders are no check. They cut a tensor to its shard before they compare, so one that is too large passes;
an unknown name is a line in the log; a missing one is never noticed. The checkpoint that the server started from has
exactly the names and shapes that its model was built for.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tlt_server.errors import UnsupportedError

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]

FP8 = torch.float8_e4m3fn
# One is cast to another when it is loaded, as trainers that keep master weights in float32 rely on.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Spec(NamedTuple):
    """What a tensor of a checkpoint is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        return cls(tuple(tensor.shape), tensor.dtype)

    def misfit(self, other: "Spec") -> str | None:
        """Why `other` cannot take this one's place; None where it can."""
        if other.shape != self.shape:
            return f"its shape is {list(other.shape)}, the model's is {list(self.shape)}"
        if other.dtype != self.dtype and not {other.dtype, self.dtype} <= FLOATS:
            return f"its dtype is {other.dtype}, the model's is {self.dtype}"
        return None


BLOCKS_LOADED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""SGLang's classes that are shown to load fp8 by blocks. Llama's drops the scales, and says so in its log alone."""
Schema = Mapping[str, Spec]


def not_finite(tensors: Iterable[NamedTensor], dtype: torch.dtype | None = None) -> list[str]:
    """The names of those that hold NaN or infinity, once they are cast to `dtype`. By the extremes, of which NaN would
    be one: that takes one pass over memory, no more of it, and one wait for the device; fp8's NaN by its bits."""
    tensors = list(tensors)
    floats = [(name, tensor) for name, tensor in tensors if tensor.dtype in FLOATS and tensor.numel()]
    found = [name for name, tensor in tensors if tensor.dtype == FP8 and _has_nan(tensor)]
    for device in {tensor.device for _, tensor in floats}:
        here = [(name, tensor) for name, tensor in floats if tensor.device == device]
        extremes = [torch.stack(torch.aminmax(tensor)).to(dtype or tensor.dtype).float() for _, tensor in here]
        finite = torch.isfinite(torch.stack(extremes)).all(1).tolist()
        found += [name for (name, _), fine in zip(here, finite, strict=True) if not fine]
    return found


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())


def holds_as_published(model_config: Any) -> bool:
    """Whether the parameters of an upstream `ModelConfig`'s model are those of its checkpoint, so that what an update
    brings can be held against them and written in place: unquantized, or fp8 by blocks where DeepGEMM repacks none."""
    from sglang.srt.model_loader.utils import should_deepgemm_weight_requant_ue8m0

    if model_config.quantization is None:
        return True
    blocks = (getattr(model_config.hf_config, "quantization_config", None) or {}).get("weight_block_size")
    return model_config.quantization == "fp8" and bool(blocks) and not should_deepgemm_weight_requant_ue8m0(blocks)


def require_as_published(model_config: Any, own_head: bool) -> None:
    """Raises UnsupportedError: a target is quantized in a way that speculation was not tried with. own_head: its MTP
    head drafts, which would be quantized too."""
    if (kind := model_config.quantization) is None:
        return
    if own_head or not holds_as_published(model_config) or model_config.hf_config.architectures[0] not in BLOCKS_LOADED:
        raise UnsupportedError(
            f"target {model_config.model_path} is quantized ({kind}), and speculation is tested with fp8 by blocks "
            f"(weight_block_size) of {', '.join(BLOCKS_LOADED)} alone, by an EAGLE drafter. Add --no-speculation"
        )


def schema_of(tensors: Iterable[NamedTensor]) -> Schema:
    return {name: Spec.of(tensor) for name, tensor in tensors}


def tensors_in(files: Sequence[str | Path]) -> Iterator[NamedTensor]:
    """The tensors of checkpoint files, safetensors or pickles of a state dict, whose code is not run. They are mapped
    into memory: a page is read when it is touched."""
    from safetensors import safe_open

    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, opened.get_tensor(name)
        else:
            yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()


def start_schema(model_runner: Any) -> Schema | None:
    """The schema of the checkpoint that an upstream `ModelRunner` loaded; None where there was none (`--load-format
    dummy`), or none that can be read."""
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load_format = LoadFormat(model_runner.server_args.load_format)
    if load_format not in (LoadFormat.AUTO, LoadFormat.SAFETENSORS, LoadFormat.PT):
        return None
    config = model_runner.model_config
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    return schema_if_readable(
        config.model_path,
        lambda: loader._prepare_weights(config.model_path, config.revision, fall_back_to_pt=True)[1],
    )


def schema_if_readable(model: str, files: Callable[[], Sequence[str | Path]]) -> Schema | None:
    """None where its files cannot be read by us: what an update sends is then held against the model alone."""
    try:
        return schema_of(tensors_in(files()))
    except Exception as error:  # noqa: BLE001 - SGLang has loaded them, in whatever way, and serves the model
        logger.warning("%s: its names and shapes cannot be read (%s)", model, error)
        return None
