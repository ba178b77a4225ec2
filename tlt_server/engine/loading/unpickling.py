"""Reads the pickles that trainers send tensors in, and runs nothing of them.

A pickle is a program that names what it calls. Upstream lets it call whatever lies in modules that it trusts, of which
`builtins` alone is enough to run anything. Here a name stands for one of `MAKES`, which check what they are given, or
for a value of `NAMES` that cannot be called; no object gets a state but `RECORDS`; opcodes that trainers do not need
are none.
"""

import io
import os
import pickle
import re
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pybase64
import torch
from torch.multiprocessing import reductions

from tlt_server.errors import UpdateRefused

SHARE = 'share CPU tensors by file: torch.multiprocessing.set_sharing_strategy("file_system") before serializing them'
CUDA_COUNTERS = 10_000
"""Of references, in one of the files that torch keeps them in; 8 bytes each."""
MALFORMED = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError),
    *(struct.error, RuntimeError, OSError, AssertionError, RecursionError),
)
"""What a pickle that is damaged, or means harm, ends in."""


def unpickled(data: bytes | str) -> Any:
    """What a trainer serialized with SGLang's `MultiprocessingSerializer`. Raises UpdateRefused: it is not tensors, and
    what goes with them."""
    try:
        return _Reader(io.BytesIO(pybase64.b64decode(data, validate=True) if isinstance(data, str) else data)).load()
    except MALFORMED as error:
        raise UpdateRefused(f"serialized tensors cannot be read: {type(error).__name__} {error}") from error


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise UpdateRefused(f"serialized tensors: {what}")


# -- what a pickle may call --


def _tensor(kind: type, storage: Any, metadata: tuple[int, Sequence[int], Sequence[int], bool]) -> Any:
    """A view that reached beyond its storage would be read beyond the memory that the trainer shares."""
    offset, size, stride, requires_grad = metadata
    _check(isinstance(storage, torch.storage.TypedStorage), f"a tensor is made of a {type(storage).__name__}")
    room = storage._untyped_storage.nbytes() // torch._utils._element_size(storage.dtype)
    _check_extent(room, offset, size, stride)
    return reductions.rebuild_tensor(kind, storage, (offset, tuple(size), tuple(stride), bool(requires_grad)))


def _check_extent(room: int, offset: int, size: Sequence[int], stride: Sequence[int]) -> None:
    numbers = [offset, *size, *stride]
    _check(all(type(each) is int and 0 <= each < 1 << 60 for each in numbers), "sizes that are no sizes")
    _check(len(size) == len(stride), "as many strides as sizes are needed")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    _check(0 in size or last < room, f"a tensor of {last + 1} elements in memory of {room}")


def _filename_storage(kind: Any, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None) -> Any:
    """Memory in a file of /dev/shm, kept by a manager of torch's that the trainer has started."""
    _check(isinstance(manager, bytes) and isinstance(handle, bytes), "handles that are no bytes")
    _check(type(size) is int and size >= 0 and isinstance(dtype, torch.dtype | None), "a storage without a size")
    bytes_asked = size * (torch._utils._element_size(dtype) if dtype else 1)
    socket = Path(os.fsdecode(manager))
    _check(socket.name == "manager.sock" and socket.is_socket(), f"{str(socket)!r} is no manager of torch's. {SHARE}")
    _check_shared(handle, bytes_asked)
    return reductions.rebuild_storage_filename(kind, manager, handle, size, dtype)


def _check_shared(handle: bytes, size: int) -> None:
    """What is mapped beyond its file's end kills the process that reads it; torch makes a file that is short longer."""
    _check(re.fullmatch(rb"/(torch|cuda\.shm)[\w.]{1,200}", handle) is not None, f"{handle!r} is no memory of torch's")
    try:
        found = os.lstat(b"/dev/shm" + handle)
    except OSError as error:
        raise UpdateRefused(f"shared memory {handle!r}: {error.strerror}. A trainer shares our machine") from error
    _check(stat.S_ISREG(found.st_mode), f"{handle!r} is no file")
    _check(found.st_size >= size, f"{handle!r} has {found.st_size} bytes, not {size}")


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    _check(isinstance(storage, torch.UntypedStorage) and isinstance(dtype, torch.dtype), "a storage without a dtype")
    return reductions.rebuild_typed_storage(storage, dtype)


def _typed_storage_child(storage: torch.UntypedStorage, kind: Any) -> Any:
    _check(isinstance(storage, torch.UntypedStorage) and kind in LEGACY.values(), "a storage without a type")
    return reductions.rebuild_typed_storage_child(storage, kind)


def _empty_storage(kind: Any) -> Any:
    _check(kind in (torch.UntypedStorage, torch.storage.TypedStorage, *LEGACY.values()), "a storage without a type")
    return kind()


def _cuda_tensor(*given: Any) -> Any:
    """A tensor on a GPU of this machine, by CUDA's handle. What the handle leads to is the driver's to check."""
    kind, size, stride, offset, storage, dtype, device, handle, nbytes = given[:9]
    begin, _, counter, counter_offset, event, event_needed = given[9:]
    _check(kind in TENSORS and storage in (torch.UntypedStorage, torch.storage.TypedStorage), "a tensor without a type")
    _check(isinstance(dtype, torch.dtype) and type(device) in (int, str), "a tensor without a dtype, or without a GPU")
    _check(type(begin) is int and begin >= 0 and type(nbytes) is int and nbytes >= 0, "memory without a size")
    _check_extent(nbytes // torch._utils._element_size(dtype), offset, size, stride)
    if handle is not None and nbytes:
        _check(all(isinstance(each, bytes) for each in (handle, counter, event)), "handles that are no bytes")
        _check(type(counter_offset) is int and 0 <= counter_offset < CUDA_COUNTERS, "a counter that is none")
        _check(type(event_needed) is bool, "an event that is none")
        _check_shared(counter, 8 * CUDA_COUNTERS)
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()  # GPUs by their names: a trainer may number them in another way
    return reductions.rebuild_cuda_tensor(*given)


def _stored_bytes(data: bytes) -> Any:
    """A storage by value, as plain `pickle` writes it: a pickle in the pickle, which torch reads as it does weights."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _tensor_by_value(storage: Any, offset: int, size: Any, stride: Any, requires_grad: Any, *_: Any) -> Any:
    return _tensor(torch.Tensor, storage, (offset, size, stride, requires_grad))


def _parameter(data: Any, requires_grad: Any, *_: Any) -> Any:
    _check(isinstance(data, torch.Tensor), "a parameter that is no tensor")
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _size(*given: Any) -> torch.Size:
    return torch.Size(*given)


def _device(*given: Any) -> torch.device:
    return torch.device(*given)


def _ordered(*given: Any) -> OrderedDict[Any, Any]:
    return OrderedDict(*given)


def _by_descriptor(*_: Any) -> NoReturn:
    raise UpdateRefused(f"serialized tensors: a file descriptor cannot be sent over HTTP; {SHARE}")


REDUCTIONS = "torch.multiprocessing.reductions"
MAKES: dict[tuple[str, str], Callable[..., Any]] = {
    (REDUCTIONS, "rebuild_tensor"): _tensor,
    (REDUCTIONS, "rebuild_storage_filename"): _filename_storage,
    (REDUCTIONS, "rebuild_storage_empty"): _empty_storage,
    (REDUCTIONS, "rebuild_storage_fd"): _by_descriptor,
    (REDUCTIONS, "rebuild_typed_storage"): _typed_storage,
    (REDUCTIONS, "rebuild_typed_storage_child"): _typed_storage_child,
    (REDUCTIONS, "rebuild_cuda_tensor"): _cuda_tensor,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _cuda_tensor,
    ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"): _cuda_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_by_value,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "_load_from_bytes"): _stored_bytes,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("collections", "OrderedDict"): _ordered,
}
TENSORS = {torch.Tensor: ("torch", "Tensor"), torch.nn.Parameter: ("torch.nn.parameter", "Parameter")}
LEGACY: dict[str, Any] = {kind.__name__: kind for kind in torch._storage_classes if kind.__module__ == "torch"}
NAMES: dict[tuple[str, str], Any] = {
    **{name: kind for kind, name in TENSORS.items()},
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    **{("torch", name): kind for name, kind in LEGACY.items()},
    **{("torch", str(each)[6:]): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
}


def _record(module: str, name: str) -> type | None:
    """Upstream's two classes for what goes with tensors, where it keeps them and where its older versions did."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    runner = "sglang.srt.model_executor.model_runner"
    return {
        (LocalSerializedTensor.__module__, "LocalSerializedTensor"): LocalSerializedTensor,
        (runner, "LocalSerializedTensor"): LocalSerializedTensor,
        (FlattenedTensorMetadata.__module__, "FlattenedTensorMetadata"): FlattenedTensorMetadata,
        (runner, "FlattenedTensorMetadata"): FlattenedTensorMetadata,
    }.get((module, name))


class _Record:
    """Stands for a class whose objects have fields and nothing else."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


_NAMED = """PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT
    SETITEM SETITEMS"""
OPCODES = tuple(ord(getattr(pickle, name)) for name in _NAMED.split())

_Unpickler: Any = pickle._Unpickler
"""The one that is written in Python, whose opcodes can be taken away."""


class _Reader(_Unpickler):
    """Knows the opcodes that trainers' pickles have; any other is a KeyError."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("multiprocessing.resource_sharer", "DupFd"):
            _by_descriptor()
        if (found := MAKES.get((module, name), NAMES.get((module, name)))) is not None:
            return found
        if (kind := _record(module, name)) is not None:
            return _Record(kind)
        raise UpdateRefused(f"serialized tensors: they need no {module}.{name}")

    def _reduce(self) -> None:
        given, make = self.stack.pop(), self.stack.pop()
        _check(type(given) is tuple, "a call without arguments")
        if isinstance(make, _Record):
            self.append(make.kind(*given))
            return
        _check(any(make is each for each in MAKES.values()), "a call of what is no function of tensors")
        self.append(make(*given))

    def _new(self) -> None:
        given, record = self.stack.pop(), self.stack.pop()
        _check(isinstance(record, _Record) and given == (), "an object that is no tensor")
        self.append(object.__new__(record.kind))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        names = {field.name for field in fields(made)} if type(made).__module__.startswith("sglang.") else set()
        _check(bool(names) and type(state) is dict and set(state) == names, "a state of what has none")
        vars(made).update(state)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: _Unpickler.dispatch[code] for code in OPCODES},
        ord(pickle.REDUCE): _reduce,
        ord(pickle.NEWOBJ): _new,
        ord(pickle.BUILD): _build,
    }
