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
from tlt_server.history.index import (
    CLASSES,
    DEEPEST,
    LEAST,
    LOOKS,
    PAGE,
    TAIL,
    VOTES,
    Drafts,
    History,
    Ints,
    Judged,
    Numbers,
    no_drafts,
)
from tlt_server.history.reference import PlainIndex

SOURCE = Path(__file__).with_name("index.c")
COMPILE = ("cc", "-O3", "-shared", "-fPIC", "-std=c11")
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "index_new": (c_void_p, [c_uint32, c_uint32]),
    "index_free": (None, [c_void_p]),
    "index_clear": (None, [c_void_p]),
    "index_tokens": (c_int64, [c_void_p]),
    "index_bytes": (c_int64, [c_void_p]),
    "index_begin": (c_int, [c_void_p, c_uint32, c_uint64, c_uint32, c_void_p]),
    "index_unknown": (c_int, [c_void_p, c_void_p, c_int]),
    "index_stamp": (None, [c_void_p, c_void_p, c_int, c_uint32]),
    "index_add": (None, [c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "index_judged": (None, [c_void_p] * 4),
    "index_draft": (None, [c_void_p, c_void_p, *[c_int] * 4, c_float, *[c_void_p] * (2 + len(Drafts._fields))]),
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

    def __del__(self) -> None:
        if getattr(self, "_index", None):
            self._c.index_free(self._index)

    def clear(self) -> None:
        self._c.index_clear(self._index)

    def begin(self, response: int, prompt: int, tail: Ints, version: int) -> None:
        _require(tail, TAIL)
        if self._c.index_begin(self._index, response, prompt, version, tail.ctypes.data):
            raise MemoryError(f"response {response} of a history")

    def stamp(self, responses: Numbers, version: int) -> None:
        _, place, count = self._numbers(responses)
        self._c.index_stamp(self._index, place, count, version)

    def add(self, responses: Numbers, counts: Sequence[int] | Ints, tokens: Ints) -> None:
        (_, place, count), each = self._numbers(responses), np.asarray(counts, np.int32)
        _require(each, count)
        width = tokens.shape[1] if tokens.ndim > 1 else 0
        if width:
            _require(tokens, count, max(width, int(each.max(initial=0))))
        else:
            _require(tokens, int(each.sum()))
        self._c.index_add(self._index, place, each.ctypes.data, count, tokens.ctypes.data, width)

    def draft(self, responses: Numbers, most: int) -> Drafts:
        return self._draft(responses, most, min(most, DEEPEST), None, None)

    def look(
        self, responses: Numbers, most: int, deepest: int, rates: NDArray[np.float64]
    ) -> tuple[Drafts, NDArray[np.float64]]:
        if deepest > DEEPEST:
            raise ValueError(f"{deepest} tokens are to be judged: at most {DEEPEST} can be")
        found = np.zeros((len(responses), deepest))
        return self._draft(responses, most, deepest, rates.ctypes.data, found.ctypes.data), found

    def _draft(self, responses: Numbers, most: int, deepest: int, rates: int | None, found: int | None) -> Drafts:
        _, place, count = self._numbers(responses)
        drafts = no_drafts(count, most)
        places = (values.ctypes.data for values in drafts)
        self._c.index_draft(self._index, place, count, most, deepest, VOTES, LEAST, rates, found, *places)
        return drafts

    def judged(self) -> Judged:
        found, looks = np.empty((2, *CLASSES), np.uint32), np.empty(LOOKS)
        self._c.index_judged(self._index, found[0].ctypes.data, found[1].ctypes.data, looks.ctypes.data)
        return Judged(found.astype(np.int64), looks)

    @property
    def tokens(self) -> int:
        return int(self._c.index_tokens(self._index))

    @property
    def bytes(self) -> int:
        return int(self._c.index_bytes(self._index))

    def _numbers(self, responses: Numbers) -> tuple[NDArray[np.uint32], int, int]:
        """As C takes them: their place in memory, as long as the array is held, and how many there are."""
        numbers = np.asarray(responses, np.uint32)
        place, count = numbers.ctypes.data, len(numbers)
        if (known := self._c.index_unknown(self._index, place, count)) < count:
            raise KeyError(int(numbers[known]))
        return numbers, place, count


def _require(values: Ints, *shape: int) -> None:
    if values.dtype != np.int32 or values.shape != shape or not values.flags.c_contiguous:
        raise ValueError(f"{values.dtype} {values.shape}, where int32 {shape} is wanted, in one piece")
