"""The target's checkpoint, of which only what a drafter starts from is read."""

import io
from pathlib import Path

import torch
from torch import Tensor

from tlt_server import files
from tlt_server.drafter import header
from tlt_server.drafter.config import ModelConfig, target_config
from tlt_server.errors import ConfigError
from tlt_server.preflight import model_folder, read_config

CHUNK_BYTES = 256 << 20
"""Of pinned memory, by way of which a tensor is read to a GPU: several times as fast as by other memory."""
CPU = torch.device("cpu")


def find_target(name: str) -> tuple[Path, ModelConfig]:
    """A target's folder and config, by its folder or hub name. ConfigError: none, or no drafter can be made for it."""
    folder = model_folder("target", name)
    return folder, target_config(read_config(folder), str(folder / "config.json"))


def read_tensor(folder: Path, *names: str, like: Tensor | None = None, device: torch.device = CPU) -> Tensor:
    """The first of `names` that the safetensors files in `folder` hold, on the device; of all others the headers alone
    are read.

    Not mapped: whoever cuts a mapped file short ends the process.

    Raises ConfigError: they hold none, it is not of the shape of `like`, or one of the files is damaged.
    """
    try:
        paths = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"target {str(folder)!r}: not a folder that can be read ({error})") from error
    for name in names:
        for path in paths:
            try:
                if (found := _read_from(path, name, like, device)) is not None:
                    return found
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: damaged or incomplete ({error}). Copy or download it again") from error
    raise ConfigError(f"target {folder}: its safetensors files hold no {' and no '.join(names)}. Download it whole")


def _read_from(path: Path, name: str, like: Tensor | None, device: torch.device) -> Tensor | None:
    with files.regular(path) as (file, size):
        entries, begin = header.of(file, size)
        if (entry := entries.get(name)) is None:
            return None
        dtype = entry.type()
        if like is not None and entry.shape != like.shape:
            raise ValueError(f"{name} is {list(entry.shape)}, where {list(like.shape)} is wanted")
        content = torch.empty(entry.nbytes, dtype=torch.uint8, device=device)
        file.seek(begin + entry.data_offsets[0])
        _fill(file, content)
        return content.view(dtype).view(entry.shape)


def _fill(file: io.FileIO, content: Tensor) -> None:
    """Reads until the tensor [bytes] is full."""
    if not content.is_cuda:
        files.fill(file, memoryview(content.numpy()))
        return
    chunk = torch.empty(min(len(content), CHUNK_BYTES), dtype=torch.uint8, pin_memory=True)
    for part in content.split(CHUNK_BYTES):
        arrived = chunk[: len(part)]
        files.fill(file, memoryview(arrived.numpy()))
        part.copy_(arrived)
