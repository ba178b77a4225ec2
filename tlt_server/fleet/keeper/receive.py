"""A keeper's groups, SGLang's by their names and vLLM's, and what a trainer broadcasts through them."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from tlt_server.engine.messages import Join, Receive
from tlt_server.engine.transfer.chunks import Described, described, receive
from tlt_server.engine.transfer.group import Group, join
from tlt_server.engine.weights import groups
from tlt_server.errors import UpdateRefused
from tlt_server.fleet.keeper.folder import Kept

BUCKET = "flattened_bucket"
NAME = "weight_update_group"
"""SGLang's, of a group that is given none."""


class InitGroup(msgspec.Struct):
    """What a keeper reads of SGLang's `InitWeightsUpdateGroupReqInput`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = NAME
    backend: str = "nccl"


class OfGroup(msgspec.Struct):
    """Likewise of a call to a group that there is, with the tensors that are broadcast in it."""

    group_name: str = NAME
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    load_format: str | None = None


class Receiver:
    """One rank of each group. Blocks while a trainer is waited for: called from one thread."""

    def __init__(self, kept: Kept, device: torch.device, timeout_s: float) -> None:
        self._kept, self._device, self._timeout_s = kept, device, timeout_s
        self._named: dict[str, Any] = {}
        self._vllms: Group | None = None
        self._joined: Join | None = None
        self._last: list[Described] = []

    @property
    def joined(self) -> bool:
        return bool(self._named) or self._vllms is not None

    # -- SGLang's --

    def init(self, asked: InitGroup) -> None:
        """UpdateRefused: no trainer there, or it asks for what cannot be."""
        self._kept.drop_staged()
        groups.join(SimpleNamespace(_model_update_group=self._named, tp_rank=0), asked)

    def destroy(self, asked: OfGroup) -> None:
        if (group := self._named.pop(asked.group_name, None)) is None:
            raise UpdateRefused(f"no group {asked.group_name!r}")
        _Named(group).close()

    def update(self, asked: OfGroup) -> None:
        """UpdateRefused: no such group, or tensors that are none. RuntimeError: the trainer is gone. OSError or
        SafetensorError: what came cannot be written."""
        if (group := self._named.get(asked.group_name)) is None:
            raise UpdateRefused(f"no group {asked.group_name!r}: POST /init_weights_update_group makes one")
        dtypes = [dtype.removeprefix("torch.") for dtype in asked.dtypes]
        tensors = described(Receive(asked.names, dtypes, asked.shapes))
        if (kind := asked.load_format) not in (None, "auto", BUCKET):
            raise UpdateRefused(f"load_format {kind!r}: a keeper receives tensors one by one, or as {BUCKET}")
        self._receive(_Named(group), tensors, 2**62 if kind == BUCKET else None)

    # -- vLLM's --

    def begin(self, ask: Join) -> None:
        self.shut()
        self._kept.drop_staged()
        if not 1 <= ask.rank_offset < ask.world_size:
            raise UpdateRefused(f"rank_offset {ask.rank_offset} of {ask.world_size}: the trainer is rank 0")
        self._vllms, self._joined, self._last = join(ask, ask.rank_offset, self._device, self._timeout_s), ask, []

    def shut(self) -> None:
        if self._vllms is not None:
            self._vllms.close()
            self._vllms = None

    def transfer(self, ask: Receive) -> None:
        if self._vllms is None or self._joined is None:
            raise UpdateRefused("there is no weight transfer: POST /init_weight_transfer_engine makes one")
        self._last = tensors = described(ask) or self._last
        packed = self._joined.packed if ask.packed is None else ask.packed
        limit = (ask.chunk_bytes or self._joined.chunk_bytes) if packed else None
        self._receive(_Timed(self._vllms, self._timeout_s), tensors, limit)

    def _receive(self, group: Group, tensors: Sequence[Described], limit: int | None) -> None:
        """Where it fails, of what was to be one publication a part is missing, and the rest may still be on its way."""
        if not tensors:
            raise UpdateRefused("the call names no tensor")
        try:
            receive(group, tensors, limit, self._device, lambda chunk: self._kept.take(dict(chunk)))
        except BaseException:
            self._kept.drop_staged()
            self._named.clear()
            self.shut()
            raise


class _Timed:
    """One of vLLM's, which has no limit of its own: it is closed where nothing comes for long."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def receive(self, buffer: torch.Tensor) -> None:
        timer = threading.Timer(self._timeout_s, self.close)
        timer.start()
        try:
            self._group.receive(buffer)
        finally:
            timer.cancel()

    def close(self) -> None:
        self._group.close()


class _Named:
    """A group of torch's as those of a transfer are."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def receive(self, buffer: torch.Tensor) -> None:
        torch.distributed.broadcast(buffer, src=0, group=self._group)
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()

    def close(self) -> None:
        torch.distributed.destroy_process_group(self._group)
