"""The group of a weight transfer: the trainer is rank 0 and broadcasts; the server's ranks receive.

nccl    vLLM's: the trainer opens a torch `TCPStore`, without a prefix, in which lies a pickled `ncclUniqueId`; or it
        sends the id itself. After the rendezvous comes one all-reduce of a float32.
gloo    ours, where there is no GPU: a process group on the same store, under the prefix `tlt-gloo`.

SGLang's own groups are none of these: a process group of torch's, under the group's name.
"""

import io
import pickle
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
from sglang.srt.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from sglang.srt.distributed.utils import StatelessProcessGroup
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from tlt_server.engine.messages import Join
from tlt_server.errors import UpdateRefused

ID_KEY = "broadcast_from/0/0"
ID_BYTES = 128
POLL_S = 0.0005
"""Between two looks whether a broadcast has arrived: a wait for the device could not be given up."""


class Group(Protocol):
    """One rank's end."""

    def receive(self, buffer: torch.Tensor) -> None:
        """Fills it with what rank 0 broadcasts, and returns once it has. Raises RuntimeError: rank 0 is gone."""

    def close(self) -> None:
        """Ends it, whatever it waits for, from any thread."""


def join(ask: Join, rank: int, device: torch.device, timeout_s: float) -> Group:
    """Returns once all ranks are there. device: of the tensors that will come.

    Raises:
        UpdateRefused: what lies in the store is no id of NCCL's.
        RuntimeError: nobody came within about `timeout_s` seconds, or no NCCL library is there.
    """
    timeout, store = timedelta(seconds=timeout_s), None
    if ask.address is not None:
        host, port = ask.address
        store = TCPStore(host.strip("[]"), port, ask.world_size, False, timeout, use_libuv=False)
    if device.type == "cpu":
        return _Gloo(ProcessGroupGloo(PrefixStore("tlt-gloo", store), rank, ask.world_size, timeout))
    unique_id = read_id(store.get(ID_KEY)) if store else ask.unique_id
    return _Nccl(_Rendezvous(rank, ask.world_size, store, unique_id), device)


def read_id(pickled: bytes) -> bytes:
    """NCCL's id in the pickle that vLLM makes of it; nothing else of a pickle is read, and none of it run."""
    try:
        value = _IdReader(io.BytesIO(pickled)).load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UpdateRefused(f"the trainer's store holds no id of NCCL's: {type(error).__name__} {error}") from error
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise UpdateRefused(f"the trainer's store holds no id of NCCL's, but {type(value).__name__}")
    return value


class _IdReader(pickle.Unpickler):
    """Takes the bytes of the one structure that it knows; what would make the structure is never called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return _bytes_of
        if name == "ncclUniqueId":
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that an id is made of")


def _bytes_of(kind: Any, state: Any) -> Any:
    if kind != "ncclUniqueId" or not isinstance(state, tuple) or len(state) != 2:
        raise pickle.UnpicklingError("a structure that is no id")
    return state[1]


class _Gloo:
    def __init__(self, group: Any) -> None:
        self._group = group

    def receive(self, buffer: torch.Tensor) -> None:
        self._group.broadcast([buffer], BroadcastOptions()).wait()

    def close(self) -> None:
        self._group.abort()


class _Rendezvous(StatelessProcessGroup):
    """What SGLang's communicator asks for an id; its own would run the pickle, which names a class of vLLM's."""

    def __init__(self, rank: int, world_size: int, store: Any, unique_id: bytes | None) -> None:
        super().__init__(rank, world_size, store)
        self._unique_id = unique_id

    def broadcast_obj(self, obj: Any, src: int) -> Any:  # noqa: ARG002 - upstream's signature
        return ncclUniqueId.from_buffer_copy(self._unique_id)


class _Nccl:
    """Upstream's communicator disables itself without a word where it finds no library, and broadcasts nothing."""

    def __init__(self, rendezvous: _Rendezvous, device: torch.device) -> None:
        self._communicator = PyNcclCommunicator(rendezvous, device)
        if not self._communicator.available:
            raise RuntimeError("no NCCL library is found")
        self._stream = torch.cuda.Stream(device)
        self._closed = False

    def receive(self, buffer: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream), self._communicator.change_state(enable=True):
            self._communicator.broadcast(buffer, 0)
        arrived = self._stream.record_event()
        while not arrived.query():
            if self._closed:
                raise RuntimeError("given up")
            time.sleep(POLL_S)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # upstream's binding has ncclCommDestroy alone, which waits for a trainer that may be gone
            self._communicator.nccl.lib.ncclCommAbort(self._communicator.comm)
