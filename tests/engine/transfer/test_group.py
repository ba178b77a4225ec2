"""NCCL's id is read out of a pickle, and nothing else is, nor run."""

import ctypes
import os
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from tlt_server.engine.transfer.group import ID_BYTES, read_id
from tlt_server.errors import UpdateRefused

VLLM = "vllm.distributed.device_communicators.pynccl_wrapper"


@pytest.fixture
def unique_id(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's structure, under its name."""

    class ncclUniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = VLLM, "ncclUniqueId"
    module: Any = ModuleType(VLLM)
    module.ncclUniqueId = ncclUniqueId
    for end in range(1, len(VLLM.split(".")) + 1):
        monkeypatch.setitem(sys.modules, ".".join(VLLM.split(".")[:end]), module)
    return ncclUniqueId


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_an_id_is_read(unique_id: Any, protocol: int) -> None:
    sent = bytes(range(ID_BYTES))
    assert read_id(pickle.dumps(unique_id.from_buffer_copy(sent), protocol)) == sent


class Calls:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        pickle.dumps(b"short"),
        pickle.dumps([1]),
        pickle.dumps(Calls(os.system, "true")),
        pickle.dumps(Calls(print, "x")),
        pickle.dumps(Calls(eval, "1")),
        b"c_ctypes\n_unpickle\n(I1\nI2\ntR.",
        b"c_ctypes\n_unpickle\n.",
        b"cvllm.x\nncclUniqueId\n(tR.",
    ],
)
def test_nothing_else_is_read(payload: bytes) -> None:
    with pytest.raises(UpdateRefused, match="no id of NCCL's"):
        read_id(payload)
