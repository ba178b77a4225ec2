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

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]

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


Schema = Mapping[str, Spec]


def not_finite(tensors: Iterable[NamedTensor], dtype: torch.dtype | None = None) -> list[str]:
    """The names of those that hold NaN or infinity, once they are cast to `dtype`. By the extremes, of which NaN would
    be one: that takes one pass over memory, no more of it, and one wait for the device."""
    floats = [(name, tensor) for name, tensor in tensors if tensor.dtype in FLOATS and tensor.numel()]
    found = []
    for device in {tensor.device for _, tensor in floats}:
        here = [(name, tensor) for name, tensor in floats if tensor.device == device]
        extremes = [torch.stack(torch.aminmax(tensor)).to(dtype or tensor.dtype).float() for _, tensor in here]
        finite = torch.isfinite(torch.stack(extremes)).all(1).tolist()
        found += [name for (name, _), fine in zip(here, finite, strict=True) if not fine]
    return found


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
