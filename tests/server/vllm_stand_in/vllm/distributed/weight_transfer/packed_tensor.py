"""What a trainer sends: tensors as bytes, one behind the other, in chunks that end once they exceed a size."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import BroadcastOptions


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any],
    group: Any,
    src: int,
    post_iter_func: Callable[[Any], torch.Tensor],
    buffer_size_bytes: int = 2**30,
    num_buffers: int = 2,
) -> None:
    assert src == 0
    chunk: list[torch.Tensor] = []
    for item in iterator:
        chunk.append(post_iter_func(item).detach().contiguous().flatten().view(torch.uint8))
        if sum(map(len, chunk)) > buffer_size_bytes:
            _send(group, chunk)
            chunk = []
    if chunk:
        _send(group, chunk)


def _send(group: Any, chunk: list[torch.Tensor]) -> None:
    group.gloo.broadcast([torch.cat(chunk)], BroadcastOptions()).wait()
