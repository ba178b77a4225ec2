"""A safetensors file, read into this process's own memory.

Not by the library, for two reasons. It maps the file: whoever cuts the file short meanwhile ends the process (SIGBUS).
And reading from bytes it copies each tensor while it holds the interpreter's lock, which the decode loop waits for.
Here the lock is given up for all that takes time: the read, the hash, the copies. The hash is the slowest of them, and
has a thread of its own.

The format: https://github.com/huggingface/safetensors#format
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tlt_server import files
from tlt_server.drafter import header
from tlt_server.errors import UpdateRefused

CHUNK = 1 << 24
"""Bytes that are read before they are handed to the hash."""


class Buffer:
    """Memory for one file after another: to touch fresh memory first takes longer than to read into it.

    size: bytes to begin with; a larger file makes it grow.
    pinned: whether a GPU copies out of it: at its full rate, and without a lock that kernel launches wait for.
    """

    def __init__(self, size: int = 0, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def room(self, size: int) -> torch.Tensor:
        """Its first bytes: [size] uint8, over what was read before."""
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._bytes[:size]


class TensorFile:
    """The bytes of a file; hashing and reading are of the same bytes, whatever becomes of the file.

    buffer: where they lie, until the next file is read into it. most: bytes that it may have; None: any number.
    Raises UpdateRefused: it cannot be read, or is larger.
    """

    def __init__(self, path: Path, buffer: Buffer, most: int | None = None) -> None:
        self._name = path.name
        self._hash = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, "drafter-hash")
        try:
            with files.regular(path, most) as (file, size):
                self._bytes = buffer.room(size)
                view, done = memoryview(self._bytes.numpy()), 0
                while count := file.readinto(view[done : done + CHUNK]):
                    self._hashing.submit(self._hash.update, view[done : done + count])
                    done += count
        except OSError as error:
            self._hashing.shutdown()
            raise UpdateRefused(f"{path}: {error.strerror}") from error
        if done != len(self._bytes):
            raise UpdateRefused(f"{path}: it grew shorter while it was read")

    def sha256(self) -> str:
        """In lower-case hexadecimal. Waits for the hash, which may be behind."""
        self._hashing.shutdown()
        return self._hash.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, views of the bytes. Raises UpdateRefused: it is not a whole safetensors file of plain
        dtypes."""
        try:
            head = header.length(self._bytes[:8].numpy().tobytes(), len(self._bytes))
            data = self._bytes[8 + head :]
            found = header.entries(self._bytes[8 : 8 + head].numpy().tobytes(), len(data))
        except ValueError as error:
            raise UpdateRefused(f"{self._name}: {error}") from error
        return {name: self._tensor(data, name, entry) for name, entry in found.items()}

    def _tensor(self, data: torch.Tensor, name: str, entry: header.Entry) -> torch.Tensor:
        try:
            dtype = entry.type()
        except ValueError as error:
            raise UpdateRefused(f"{self._name}: {name} {error}") from error
        part = data[slice(*entry.data_offsets)]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(entry.shape)
