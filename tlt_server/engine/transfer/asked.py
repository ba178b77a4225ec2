"""What a trainer asks for in vLLM's weight transfer, as JSON."""

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta

from tlt_server.engine import messages
from tlt_server.errors import BadRequest

ID_BYTES = 128
"""Of NCCL's unique id."""
Port = Annotated[int, Meta(ge=1, le=65535)]
Ranks = Annotated[int, Meta(ge=1, le=2**20)]
Bytes = Annotated[int, Meta(ge=1, le=2**34)]


class InitInfo(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's, of its NCCL engine; `backend` is ours."""

    rank_offset: Ranks
    world_size: Ranks
    master_address: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    master_port: Port | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: Bytes = 2**30
    packed_num_buffers: Ranks = 2
    backend: str | None = None

    def asked(self) -> messages.Join:
        """Raises BadRequest: neither a store nor an id, or both, or an id that is none."""
        store = (self.master_address, self.master_port)
        if (None in store) is (self.nccl_unique_id_b64 is None):
            raise BadRequest("init_info: give master_address and master_port, or nccl_unique_id_b64")
        address, unique_id = None, None
        if self.nccl_unique_id_b64 is not None:
            unique_id = _id(self.nccl_unique_id_b64)
        elif self.master_address is not None and self.master_port is not None:
            address = (self.master_address, self.master_port)
        where = (address, self.world_size, self.rank_offset, self.backend, unique_id)
        return messages.Join(*where, self.packed, self.packed_buffer_size_bytes)


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors in the order in which they are sent; empty: those of the last time."""

    names: Annotated[list[str], Meta(max_length=10**6)] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: Bytes | None = None
    packed_num_buffers: Ranks = 2

    def asked(self) -> messages.Receive:
        return messages.Receive(self.names, self.dtype_names, self.shapes, self.packed, self.packed_buffer_size_bytes)


class Init(msgspec.Struct):
    init_info: InitInfo


class Update(msgspec.Struct):
    """weight_dir: prime-rl's, a checkpoint on a disk that both sides see."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class Finish(msgspec.Struct):
    weight_version: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


def _id(text: str) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadRequest(f"init_info: nccl_unique_id_b64 is not base64: {error}") from error
    if len(found) != ID_BYTES:
        raise BadRequest(f"init_info: nccl_unique_id_b64 has {len(found)} bytes, NCCL's ids have {ID_BYTES}")
    return found
