"""The files of a drafter's weights: safetensors, sharded or not, or torch's."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from tlt_server import files
from tlt_server.drafter import header
from tlt_server.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
Load = Callable[[], dict[str, Tensor]]

MOST = 8 << 30
"""Bytes of all files; the drafters of the largest targets take 3 GB."""


def stored(folder: Path) -> tuple[Shapes, Load]:
    """Shapes by name, and what loads them all, from safetensors files or, where there is none, from torch's."""
    found = (sorted(folder.glob(form)) for form in ("*.safetensors", "pytorch_model*.bin", "model*.bin"))
    paths = next(filter(None, found), [])
    try:
        size = sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise ConfigError(f"drafter {folder}: {error}. Download it whole") from error
    if size > MOST:
        raise ConfigError(f"drafter {folder}: {size:,} bytes of weights, and {MOST:,} are the most: is it a drafter?")
    if paths:
        return (_safetensors if paths[0].suffix == ".safetensors" else _torch_files)(paths)
    raise ConfigError(f"drafter {folder}: no weights, neither *.safetensors nor pytorch_model*.bin. Download it whole")


def _safetensors(paths: list[Path]) -> tuple[Shapes, Load]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            with files.regular(path, MOST) as (file, size):
                shapes |= {name: entry.shape for name, entry in header.of(file, size)[0].items()}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: damaged or incomplete ({error}). Copy or download it again") from error
    return shapes, lambda: {name: tensor for path in paths for name, tensor in load(files.read(path, MOST)).items()}


def _torch_files(paths: list[Path]) -> tuple[Shapes, Load]:
    """Read by torch's unpickler of tensors alone: a pickle that names anything else is refused."""
    found: dict[str, Any] = {}
    for path in paths:
        try:
            found |= torch.load(io.BytesIO(files.read(path, MOST)), map_location="cpu", weights_only=True)
        except (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
            raise ConfigError(f"{path}: not a file of tensors ({str(error).partition(chr(10))[0]})") from error
    tensors = {name: each for name, each in found.items() if isinstance(each, Tensor)}
    return {name: tuple(each.shape) for name, each in tensors.items()}, lambda: tensors
