"""A safetensors file, read into this process's own memory.

Not by the library, for two reasons. It maps the file: whoever cuts the file short meanwhile ends the process (SIGBUS).
And reading from bytes it copies each tensor while it holds the interpreter's lock, which the decode loop waits for.
Here the lock is given up for all that takes time: the read, the hash, the copies. The hash is the slowest of them, and
has a thread of its own.

The format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from tlt_server.errors import UpdateRefused

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile:
    """The bytes of a file; hashing and reading are of the same bytes, whatever becomes of the file.

    path: of the file.
    buffer: where they lie, until the next file is read into it.

    Raises:
        UpdateRefused: it cannot be read.
    """

    def __init__(self, path: Path, buffer: Buffer) -> None:
        self._name = path.name
        if not path.is_file():  # a pipe would be waited for
            raise UpdateRefused(f"{path}: no such file")
        self._hash = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, "drafter-hash")
        try:
            with path.open("rb", buffering=0) as file:
                self._bytes = buffer.room(path.stat().st_size)
                view, done = memoryview(self._bytes.numpy()), 0
                while count := file.readinto(view[done : done + CHUNK]):
                    self._hashing.submit(self._hash.update, view[done : done + count])
                    done += count
        except OSError as error:
            raise UpdateRefused(f"{path}: {error.strerror}") from error
        if done != len(self._bytes):
            raise UpdateRefused(f"{path}: it grew shorter while it was read")

    def sha256(self) -> str:
        """In lower-case hexadecimal. Waits for the hash, which may be behind."""
        self._hashing.shutdown()
        return self._hash.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, views of the bytes.

        Raises:
            UpdateRefused: it is not a whole safetensors file of plain dtypes.
        """
        head = int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
        if len(self._bytes) < 8 or head > len(self._bytes) - 8:
            raise UpdateRefused(f"{self._name}: not a safetensors file, or cut short")
        try:
            entries = msgspec.json.decode(self._bytes[8 : 8 + head].numpy().tobytes(), type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            found = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UpdateRefused(f"{self._name}: not a safetensors file ({error})") from error
        data = self._bytes[8 + head :]
        return {name: self._tensor(data, name, entry) for name, entry in found.items()}

    def _tensor(self, data: torch.Tensor, name: str, entry: _Entry) -> torch.Tensor:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise UpdateRefused(f"{self._name}: {name} is {entry.dtype}; plain dtypes are {', '.join(DTYPES)}")
        begin, end = entry.data_offsets
        if min(entry.shape, default=0) < 0 or end - begin != math.prod(entry.shape) * dtype.itemsize:
            raise UpdateRefused(f"{self._name}: {name} has {end - begin} bytes, which is not its shape, {entry.shape}")
        if not 0 <= begin <= end <= len(data):
            raise UpdateRefused(f"{self._name}: cut short, {name} lies beyond its end")
        part = data[begin:end]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(entry.shape)
