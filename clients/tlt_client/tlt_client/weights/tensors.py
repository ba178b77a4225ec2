"""Tensors in flat buckets, and how SGLang's `/update_weights_from_tensor` is told where they lie.

A payload is a pickle of handles: of a file in /dev/shm for what lies on a CPU, of CUDA IPC for what lies on a GPU. It
names a class and a function of SGLang's, which need not be installed here.
"""

import base64
import io
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.multiprocessing import reductions

from tlt_client.errors import InvalidArgument

Named = tuple[str, torch.Tensor]

SHARED = Path("/dev/shm")
READERS = 1 << 14
"""Of a file in there: more than all ranks of any fleet."""


def buckets(tensors: Mapping[str, torch.Tensor] | Iterable[Named], most_bytes: int) -> Iterator[list[Named]]:
    """The tensors in their order, as many in each bucket as `most_bytes` holds, and at least one.

    Raises InvalidArgument: there is none.
    """
    if most_bytes < 1:
        raise InvalidArgument(f"bucket_bytes={most_bytes}: must be at least 1")
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if not bucket:
        raise InvalidArgument("there is no tensor to send")
    yield bucket


@dataclass(frozen=True)
class Place:
    """Where in a bucket a tensor lies, in bytes: the fields of SGLang's `FlattenedTensorMetadata`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int
    """Bytes, as SGLang counts it."""


class FlatBucket:
    """Tensors in one, `data`: uint8 [bytes], on `device` or where the first of them is.

    The largest elements come first, so that each tensor begins at a multiple of its own: SGLang views it there.
    """

    def __init__(self, bucket: list[Named], device: str | None = None) -> None:
        ordered = sorted(bucket, key=lambda named: -named[1].element_size())
        where = device or ordered[0][1].device
        _synchronize(where)
        flat = [each.detach().to(where).contiguous().flatten().view(torch.uint8) for _, each in ordered]
        self.data = torch.cat(flat)
        _synchronize(where)  # who reads it does so on a stream, or in a process, of its own
        self.places: list[Place] = []
        end = 0
        for (name, tensor), data in zip(ordered, flat, strict=True):
            self.places.append(Place(name, tuple(tensor.shape), tensor.dtype, end, end + len(data), len(data)))
            end += len(data)
        self._file: Path | None = None

    def described(self) -> dict[str, Any]:
        """What `/update_weights_from_distributed` is told of the broadcast."""
        return {
            "names": [place.name for place in self.places],
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in self.places],
            "shapes": [place.shape for place in self.places],
        }

    def serialized(self, ranks: int) -> list[str]:
        """A payload for each rank, in base64; each replica, and each member of a fleet, reads them all. `unlink` when
        they are read.

        Raises InvalidArgument: /dev/shm has no room.
        """
        if self.data.device.type == "cpu":
            self._share(READERS)
        payload = {"flattened_tensor": self.data, "metadata": self.places}
        return [serialized(payload) for _ in range(ranks)]

    def _share(self, more: int) -> None:
        """With so many references, which nobody takes all off: torch removes a file with the last one, and ends the
        process if it is gone already."""
        room = os.statvfs(SHARED)
        if room.f_bavail * room.f_frsize < self.data.nbytes:  # writing beyond it would end the process
            raise InvalidArgument(
                f"a bucket of {self.data.nbytes} bytes, and {SHARED} has room for {room.f_bavail * room.f_frsize}: "
                "make it larger (docker: --shm-size), or bucket_bytes smaller"
            )
        storage = self.data.untyped_storage()
        _, handle, _ = storage._share_filename_cpu_()
        self._file = SHARED / handle.decode().removeprefix("/")
        for _ in range(more):
            storage._shared_incref()

    def unlink(self) -> None:
        """No reader comes any more: memory that was not read, of an update that was refused, is not left behind."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _synchronize(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


# -- pickles --


class _Name(NamedTuple):
    """A class or function of SGLang's."""

    module: str
    name: str

    def __call__(self) -> None:
        """Only that pickle takes it for something to call; the server does."""


METADATA = _Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
CUDA_TENSOR = _Name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
DEVICE = 6
"""Place of the GPU among the arguments of torch's `rebuild_cuda_tensor`."""

_Python: Any = pickle._Pickler
"""The one that is written in Python: it can be taught to write a name that is not here."""


class _Pickler(_Python):
    def _save_name(self, name: _Name) -> None:
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())
        self.memoize(name)

    dispatch: ClassVar[dict[type, Any]] = {**_Python.dispatch, _Name: _save_name}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Place):
            return METADATA, astuple(value)
        if isinstance(value, torch.Tensor):
            make, given = reductions.reduce_tensor(value)
            if value.device.type != "cuda":
                return make, given
            # a server may number its GPUs otherwise, so SGLang takes them by their UUID
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)
            return CUDA_TENSOR, (*given[:DEVICE], uuid, *given[DEVICE + 1 :])
        if isinstance(value, torch.storage.TypedStorage):
            return reductions.reduce_typed_storage(value)
        if isinstance(value, torch.UntypedStorage):
            # by the file's name, whatever way of sharing this process has: a file descriptor does not go over HTTP
            shared = value._share_filename_cpu_()
            value._shared_incref()  # who reads it takes it off again
            return reductions.rebuild_storage_filename, (type(value), *shared)
        return NotImplemented


def serialized(payload: Any) -> str:
    """What holds tensors in shared memory or on a GPU, as `/update_weights_from_tensor` takes it."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()
