"""The index in C, compiled when it is made: a wheel with a library in it would have to be built for each machine.

ctypes lets go of the interpreter while a call runs.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import ConfigError
from tlt_server.history.index import LEAST, PAGE, TAIL, VOTES, Drafts, History, Ints, no_drafts
from tlt_server.history.reference import PlainIndex

SOURCE = Path(__file__).with_name("index.c")
COMPILE = ("cc", "-O3", "-shared", "-fPIC", "-std=c11")
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "index_new": (c_void_p, [c_uint32, c_uint32]),
    "index_free": (None, [c_void_p]),
    "index_tokens": (c_int64, [c_void_p]),
    "index_bytes": (c_int64, [c_void_p]),
    "index_begin": (c_int, [c_void_p, c_uint32, c_uint64, c_uint32, c_void_p]),
    "index_stamp": (None, [c_void_p, c_void_p, c_int, c_uint32]),
    "index_add": (None, [c_void_p, c_void_p, c_void_p, c_int, c_void_p]),
    "index_draft": (None, [c_void_p, c_void_p, c_int, c_int, c_int, c_float, *[c_void_p] * len(Drafts._fields)]),
}


def can_compile() -> bool:
    """Whether there is a C compiler here; SGLang's kernels for GPUs need one, too."""
    return shutil.which(COMPILE[0]) is not None


def make_index(capacity: int) -> History:
    """The faster one that this machine can have. ConfigError: as `CompiledIndex`."""
    return CompiledIndex(capacity) if can_compile() else PlainIndex(capacity)


@cache
def loaded() -> ctypes.CDLL:
    """Compiled in a second or less. ConfigError: it was not."""
    with tempfile.TemporaryDirectory(prefix="tlt-history-") as folder:
        made = Path(folder) / "index.so"
        told = subprocess.run([*COMPILE, "-o", made, SOURCE], capture_output=True, text=True, check=False)
        if told.returncode:
            raise ConfigError(f"{' '.join(COMPILE)} {SOURCE.name}: {told.stderr.strip()}; install another compiler")
        library = ctypes.CDLL(str(made))  # the file may go once it is mapped
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class CompiledIndex:
    """`History`. ConfigError: there is not as much memory, or no compiler.

    buckets: a power of two, of each length's contexts; None: as many as tokens, or fewer. Contexts that share a bucket
    share a chain, and what is forgotten of one hides what was written before it of the other.
    """

    def __init__(self, capacity: int, buckets: int | None = None) -> None:
        self.capacity = capacity
        self._c = loaded()
        buckets = buckets or 1 << (capacity.bit_length() - 1)
        self._index = self._c.index_new(capacity // PAGE, buckets)
        if not self._index:
            raise ConfigError(f"a history of {capacity} tokens: there is not as much memory; take fewer")
        self._begun: set[int] = set()

    def __del__(self) -> None:
        if getattr(self, "_index", None):
            self._c.index_free(self._index)

    def begin(self, response: int, prompt: int, tail: Ints, version: int) -> None:
        _require(tail, TAIL)
        if self._c.index_begin(self._index, response, prompt, version, tail.ctypes.data):
            raise MemoryError(f"response {response} of a history")
        self._begun.add(response)

    def stamp(self, responses: Sequence[int], version: int) -> None:
        self._c.index_stamp(self._index, self._numbers(responses).ctypes.data, len(responses), version)

    def add(self, responses: Sequence[int], counts: Sequence[int], tokens: Ints) -> None:
        numbers, each = self._numbers(responses), np.array(counts, np.int32)
        _require(each, len(numbers))
        _require(tokens, int(each.sum()))
        self._c.index_add(self._index, numbers.ctypes.data, each.ctypes.data, len(numbers), tokens.ctypes.data)

    def draft(self, responses: Sequence[int], most: int) -> Drafts:
        drafts = no_drafts(len(responses), most)
        numbers, places = self._numbers(responses), (values.ctypes.data for values in drafts)
        self._c.index_draft(self._index, numbers.ctypes.data, len(numbers), most, VOTES, LEAST, *places)
        return drafts

    @property
    def tokens(self) -> int:
        return int(self._c.index_tokens(self._index))

    @property
    def bytes(self) -> int:
        return int(self._c.index_bytes(self._index))

    def _numbers(self, responses: Sequence[int]) -> NDArray[np.uint32]:
        """As C takes them: it checks nothing."""
        if not self._begun.issuperset(responses):
            raise KeyError(sorted(set(responses) - self._begun)[0])
        return np.array(responses, np.uint32)


def _require(values: Ints, length: int) -> None:
    if values.dtype != np.int32 or values.shape != (length,) or not values.flags.c_contiguous:
        raise ValueError(f"{values.dtype} {values.shape}, where int32 ({length},) is wanted, in one piece")
