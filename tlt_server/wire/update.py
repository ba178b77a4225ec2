"""A drafter update as bytes: the safetensors file that it is, cut into chunks by the sender, joined by the receiver."""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tlt_server.errors import WireError
from tlt_server.wire.messages import Buffer, DrafterUpdate, ModelIdentity

CHUNK_BYTES = 2 << 20
"""Between 1 and 4 MiB ZMQ is fastest; a larger one makes other messages wait longer."""

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class Tensor(NamedTuple):
    """dtype: safetensors' name, as in `BF16`. data: contiguous, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def safetensors_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file in memory; a copy, so the tensors may change afterwards. Raises as `safetensors_parts`."""
    return b"".join(safetensors_parts(tensors, metadata))


def safetensors_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Buffer]:
    """What makes a safetensors file, end to end; the tensors' own memory is not copied.

    Format: https://github.com/huggingface/safetensors#format. Wide items come first, which keeps every tensor aligned.

    Raises:
        WireError: a dtype that safetensors does not have, or data that do not fill the shape.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__" or tensor.dtype not in _ITEM_BYTES:
            raise WireError(f"tensor {name} of dtype {tensor.dtype}: safetensors has no such name or dtype")
    ordered = sorted(tensors.items(), key=lambda item: (-_ITEM_BYTES[item[1].dtype], item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, data) in ordered:
        start, end = end, end + memoryview(data).nbytes
        if end - start != (expected := _ITEM_BYTES[dtype] * math.prod(shape)):
            raise WireError(f"tensor {name}: {end - start} bytes; {dtype} {shape} takes {expected}")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(tensor.data for _, tensor in ordered)]


class Outgoing:
    """An update as the sender holds it: `header`, and the chunks that it tells of."""

    def __init__(self, file: bytes, version: int, trained_on: int, model: ModelIdentity, chunk_bytes: int) -> None:
        self._file = memoryview(file)
        self._chunk_bytes = chunk_bytes
        with ThreadPoolExecutor() as pool:  # hashing gives the interpreter lock away
            digests = b"".join(pool.map(self._sha256, range(-(-len(file) // chunk_bytes))))
        size = len(file)
        self.header = DrafterUpdate(
            version=version, trained_on=trained_on, model=model, size=size, chunk_bytes=chunk_bytes, digests=digests
        )
        self.digest = self.header.digest

    def chunk(self, index: int) -> memoryview:
        return self._file[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]

    def _sha256(self, index: int) -> bytes:
        return hashlib.sha256(self.chunk(index)).digest()


class Incoming:
    """An update as the receiver joins it: a file that grows by one verified chunk after another.

    The file is named by the update's contents, so what an earlier life of the receiver left of the same update is found
    again. Every method that touches the file raises OSError where the disk does.
    """

    def __init__(self, header: DrafterUpdate, folder: Path) -> None:
        self.header = header
        self.digest = header.digest
        self.path = folder / f"{self.digest.hex()[:16]}.partial"
        self.next = 0
        self._file: io.FileIO | None = None

    @property
    def missing(self) -> int:
        """Bytes."""
        return max(self.header.size - self.next * self.header.chunk_bytes, 0)

    def resume(self) -> None:
        """Opens the file, and keeps of it the chunks that are good."""
        self._file = self.path.open("a+b", buffering=0)
        self._file.seek(0)
        while self.missing and self._is_next(self._file.read(self.header.chunk_bytes)):
            self.next += 1
        self._file.truncate(min(self.next * self.header.chunk_bytes, self.header.size))

    def add(self, index: int, chunk: Buffer) -> bool:
        """Appends a chunk; False where another one is due, as after a loss, and nothing was done.

        Raises:
            WireError: it is not what the sender said it would be.
        """
        assert self._file is not None
        if index != self.next:
            return False
        if not self._is_next(chunk):
            raise WireError(f"chunk {index} of drafter {self.header.version} was damaged: its sha256 is wrong")
        rest = memoryview(chunk)
        while rest:  # an unbuffered write may write a part, before it fails
            rest = rest[self._file.write(rest) :]
        self.next += 1
        return True

    def finish(self, path: Path) -> None:
        """Gives the whole file its name."""
        self._close()
        self.path.rename(path)

    def drop(self) -> None:
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _is_next(self, chunk: Buffer) -> bool:
        return hashlib.sha256(chunk).digest() == self.header.digests[32 * self.next : 32 * (self.next + 1)]
