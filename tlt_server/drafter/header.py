"""The header of a safetensors file, bounded before anything is made of it.

The format: https://github.com/huggingface/safetensors#format
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from tlt_server import files

MOST_HEADER = 16 << 20
"""Bytes; a tensor takes about a hundred of them."""

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
"""Those that are read."""

Bytes = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Entry(msgspec.Struct, frozen=True):
    """A tensor: its bytes' place after the header."""

    dtype: str
    shape: Annotated[tuple[Bytes, ...], Meta(max_length=8)]
    data_offsets: tuple[Bytes, Bytes]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    def type(self) -> torch.dtype:
        """ValueError: not a plain dtype, or its bytes are not what its shape takes."""
        if (dtype := DTYPES.get(self.dtype)) is None:
            raise ValueError(f"is {self.dtype}; plain dtypes are {', '.join(DTYPES)}")
        wanted = dtype.itemsize
        for size in self.shape:
            wanted *= size
        if wanted != self.nbytes:
            raise ValueError(f"has {self.nbytes} bytes, which is not its shape, {list(self.shape)}")
        return dtype


def length(first: bytes, size: int) -> int:
    """Of the header of a file of `size` bytes, by its first eight. ValueError: it is longer than it may be."""
    found = int.from_bytes(first[:8], "little")
    if len(first) < 8 or found > min(size - 8, MOST_HEADER):
        raise ValueError("not a safetensors file, or cut short")
    return found


def entries(text: bytes, data: int) -> dict[str, Entry]:
    """The tensors by name, of a header that `data` bytes follow. ValueError: it is none."""
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        read = {name: msgspec.json.decode(raw, type=Entry) for name, raw in found.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a safetensors file ({error})") from error
    for name, entry in read.items():
        begin, end = entry.data_offsets
        if not begin <= end <= data:
            raise ValueError(f"cut short, {name} lies beyond its end")
    if sum(entry.nbytes for entry in read.values()) > data:
        raise ValueError("its tensors lie over each other")
    return read


def of(file: io.FileIO, size: int) -> tuple[dict[str, Entry], int]:
    """The tensors of an open file, and where their data begin. OSError; ValueError: not a safetensors file."""
    first = bytearray(min(8, size))
    files.fill(file, memoryview(first))
    text = bytearray(length(bytes(first), size))
    files.fill(file, memoryview(text))
    begin = 8 + len(text)
    return entries(bytes(text), size - begin), begin


def begin(name: str, shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """What a file of this one tensor begins with, before the tensor's bytes."""
    told = {known: called for called, known in DTYPES.items()}[dtype]
    entry = Entry(told, (*shape,), (0, math.prod(shape) * dtype.itemsize))
    text = msgspec.json.encode({"__metadata__": {"format": "pt"}, name: entry})
    text += b" " * (-len(text) % 8)  # the format wants the tensor to lie at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def nbytes(path: Path) -> int:
    """Of a file's tensors, as float64 would hold them: the most for a drafter of their shapes. Raises as `of`."""
    with files.regular(path) as (file, size):
        return sum(
            entry.nbytes // DTYPES.get(entry.dtype, torch.uint8).itemsize * 8 for entry in of(file, size)[0].values()
        )
