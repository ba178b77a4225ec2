"""Checkpoints that a kill at any moment cannot spoil.

    FOLDER/step-00001200/state.safetensors     every tensor that training goes on from
                         facts.json            the marker: written last, so what it lies beside is whole
    FOLDER/.step-00001250                      being written; removed at the next start

Features are not saved: servers send as many anew within minutes. Training waits while tensors are copied to host
memory; a thread writes them, and each save waits for the one before.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_server import files
from tlt_server.errors import ConfigError, DiskFailed

TENSORS, MARKER = "state.safetensors", "facts.json"


class Saved(NamedTuple):
    """A checkpoint as it was saved."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def newest(folder: Path) -> Saved | None:
    """The last checkpoint in a folder that is whole, or None; whoever else writes there. Raises ConfigError: it is
    damaged."""
    if not (steps := _steps(folder)):
        return None
    try:
        facts = msgspec.json.decode(files.read(steps[-1] / MARKER), type=dict[str, Any])
        with files.regular(steps[-1] / TENSORS):
            return Saved(load_file(steps[-1] / TENSORS), facts)
    except (OSError, SafetensorError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ConfigError(f"checkpoint {steps[-1]}: damaged ({error}). Remove it to resume from an older") from error


class Checkpoints:
    """The `keep` latest checkpoints of one trainer in `folder`, which is made; nobody else writes to it."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._host: dict[str, Tensor] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for left in {*folder.glob(".step-*"), *folder.glob("step-*")} - set(_steps(folder)):
            shutil.rmtree(left)

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Copies tensors of any device, and returns while they are written with `facts`, as JSON.

        step: number of the checkpoint; larger than any before.
        Raises DiskFailed: the checkpoint before could not be written; this one is under way all the same.
        """
        try:
            self.wait()
        finally:
            is_copied, content = self._copy(tensors), msgspec.json.encode(facts)
            self._writing = self._thread.submit(self._write, step, dict(self._host), content, is_copied)

    def wait(self) -> None:
        """Until nothing is being written. Raises DiskFailed: the last checkpoint could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Waits, as `wait` does, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def newest(self) -> Saved | None:
        """As the function."""
        return newest(self._folder)

    def _copy(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Into host memory that stays, pinned where it is a GPU's; the copy is made when the result returns. What comes
        later on the GPU's stream comes after the copy, so training need not wait for it."""
        if tensors.keys() != self._host.keys():
            self._host = {
                name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                for name, tensor in tensors.items()
            }
        for name, tensor in tensors.items():
            self._host[name].copy_(tensor, non_blocking=True)
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return lambda: event.synchronize()  # noqa: PLW0108 - torch's own has no type

    def _write(self, step: int, tensors: dict[str, Tensor], facts: bytes, is_copied: Callable[[], None]) -> None:
        whole = self._folder / f"step-{step:08}"
        partial = self._folder / f".{whole.name}"
        try:
            partial.mkdir()
            is_copied()
            save_file(tensors, partial / TENSORS)
            _to_disk(partial / TENSORS)
            (partial / MARKER).write_bytes(facts)
            _to_disk(partial / MARKER)
            partial.rename(whole)
            _to_disk(self._folder)
            for old in _steps(self._folder)[: -self._keep]:
                (old / MARKER).unlink()  # first: a folder half removed is no checkpoint
                shutil.rmtree(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise DiskFailed(f"checkpoint {whole} cannot be written ({error}): make room there") from error


def _steps(folder: Path) -> list[Path]:
    found = [marker.parent for marker in folder.glob(f"step-*/{MARKER}")]
    return sorted(found, key=lambda path: (len(path.name), path.name))  # by number, however many digits it has


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
