"""What a trainer sends in a transfer: tensors in its order, each by itself or several as one buffer of bytes."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from tlt_server.engine.loading.schema import NamedTensor
from tlt_server.engine.messages import Receive
from tlt_server.engine.transfer.group import Group
from tlt_server.errors import UpdateRefused

MOST = 2**48
"""Elements of one tensor: far beyond any, and no overflow in what is counted from it."""


class Described(NamedTuple):
    """A tensor that is to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.dtype.itemsize)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def described(ask: Receive) -> list[Described]:
    """Raises UpdateRefused: names, dtypes and shapes do not go together, or are none."""
    if not len(ask.names) == len(ask.dtypes) == len(ask.shapes):
        lengths = f"{len(ask.names)} names, {len(ask.dtypes)} dtype_names, {len(ask.shapes)} shapes"
        raise UpdateRefused(f"update_info: {lengths}; each tensor has one of each")
    found = []
    for name, dtype_name, shape in zip(ask.names, ask.dtypes, ask.shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise UpdateRefused(f"update_info: {name}: {dtype_name!r} is no dtype of torch's, as bfloat16 is")
        if any(size < 0 for size in shape) or prod(shape) > MOST:
            raise UpdateRefused(f"update_info: {name}: {shape} is no shape")
        found.append(Described(name, dtype, tuple(shape)))
    return found


def chunked(tensors: Sequence[Described], limit: int | None) -> Iterator[list[Described]]:
    """As vLLM's trainers cut them: a chunk ends with the tensor by which it exceeds `limit` bytes; without a limit each
    tensor is one."""
    chunk, size = [], 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.nbytes
        if limit is None or size > limit:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def unpacked(buffer: torch.Tensor, chunk: Sequence[Described]) -> list[NamedTensor]:
    """The tensors that lie in `buffer`, [bytes] uint8, one behind the other. Views, but of those whose bytes do not lie
    where their dtype may: these are copied."""
    found, offset = [], 0
    for name, dtype, shape in chunk:
        size = prod(shape) * dtype.itemsize
        part = buffer[offset : offset + size]
        if offset % dtype.itemsize:
            part = part.clone()
        found.append((name, part.view(dtype).view(shape)))
        offset += size
    return found


def receive(
    group: Group,
    tensors: Sequence[Described],
    limit: int | None,
    device: torch.device,
    hand: Callable[[list[NamedTensor]], None],
) -> None:
    """Receives chunk after chunk, the next one once `hand` has returned: two are never in memory."""
    for chunk in chunked(tensors, limit):
        hand(_received(group, chunk, limit, device))


def _received(group: Group, chunk: Sequence[Described], limit: int | None, device: torch.device) -> list[NamedTensor]:
    if limit is None:
        tensor = chunk[0].empty(device)
        group.receive(tensor)
        return [(chunk[0].name, tensor)]
    buffer = torch.empty(sum(each.nbytes for each in chunk), dtype=torch.uint8, device=device)
    group.receive(buffer)
    return unpacked(buffer, chunk)
