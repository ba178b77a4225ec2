"""What a trainer has broadcast, as checkpoints in a folder that members see: on a shared disk, or in /dev/shm.

    FOLDER/weights-00000007/{model-00001.safetensors, …, config.json, …}

Each is whole, whatever the trainer sent of it: what it did not send is as it was before. One appears when all of it is
there; two are kept, of which a late joiner may still be reading the older.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tlt_server.errors import ConfigError, UpdateRefused

KEPT = 2
SHARD = 2**32
"""Bytes of a file with what was not sent."""


class Kept:
    """The checkpoints of one keeper, and the one that it is receiving. model: the folder that members started from."""

    def __init__(self, folder: Path, model: Path) -> None:
        """ConfigError: model is no checkpoint, or the folder cannot be written."""
        self._folder, self._model = folder.absolute(), model
        if not list(model.glob("*.safetensors")):
            raise ConfigError(f"--model-path {model}: no folder with safetensors files, as the members read one")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._staging = self._folder / ".staging"
            shutil.rmtree(self._staging, ignore_errors=True)  # of a keeper that was killed
        except OSError as error:
            raise ConfigError(f"--folder {folder}: {error.strerror}") from error
        self._names: set[str] = set()

    @property
    def staged(self) -> int:
        """Tensors that came, and are in no checkpoint yet."""
        return len(self._names)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes what came, on whatever device it lies."""
        self._staging.mkdir(exist_ok=True)
        number = len(list(self._staging.iterdir())) + 1
        here = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        save_file(here, self._staging / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        self._names |= here.keys()

    def whole(self) -> Path:
        """Makes a checkpoint of what came. UpdateRefused: nothing did."""
        if not self._names:
            raise UpdateRefused("no tensor came since the last checkpoint")
        before = self._folders()[-1:] or [self._model]
        for number, rest in enumerate(_rest(before[0], self._names)):
            # earlier in the alphabet than what came, which holds where a tensor is read twice
            save_file(rest, self._staging / f"model-00000-{number:05}.safetensors", metadata={"format": "pt"})
        for file in self._model.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt") and ".index." not in file.name:
                shutil.copy(file, self._staging)
        made = self._folder / f"weights-{1 + max(map(_number, self._folders()), default=0):08}"
        self._staging.rename(made)
        self._names = set()
        return made

    def drop_staged(self) -> None:
        """Forgets what came since the last checkpoint."""
        self._names = set()
        shutil.rmtree(self._staging, ignore_errors=True)

    def drop(self, path: Path) -> None:
        """Removes a checkpoint that members have refused."""
        if path in self._folders():
            shutil.rmtree(path)

    def clear_away(self) -> None:
        """Removes all but the newest."""
        for old in self._folders()[:-KEPT]:
            shutil.rmtree(old)

    def _folders(self) -> list[Path]:
        return sorted(self._folder.glob("weights-[0-9]*"), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("weights-"))


def _rest(folder: Path, names: set[str]) -> Iterator[dict[str, torch.Tensor]]:
    """What a checkpoint holds besides these, in parts of about SHARD bytes."""
    part, size, seen = dict[str, torch.Tensor](), 0, set(names)
    for file in sorted(folder.glob("*.safetensors"), reverse=True):  # the last holds where a tensor is there twice
        try:
            with safe_open(file, "pt") as tensors:
                for name in set(tensors.keys()) - seen:
                    part[name] = tensors.get_tensor(name)
                    seen.add(name)
                    size += part[name].nbytes
                    if size > SHARD:
                        yield part
                        part, size = {}, 0
        except SafetensorError as error:
            raise UpdateRefused(f"{file}: damaged ({error})") from error
    if part:
        yield part
