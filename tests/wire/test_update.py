"""A drafter as bytes: a file that the safetensors library reads, cut and joined again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from tests.wire.ends import CHUNK, drafter, holds, outgoing
from tlt_server.errors import WireError
from tlt_server.wire.update import Incoming, Tensor, safetensors_file

DTYPES = {
    "BOOL": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
}


@st.composite
def tensors(draw: Any) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = DTYPES[dtype] * math.prod(shape)
    return Tensor(
        dtype, shape, draw(st.sampled_from([bytes, bytearray, memoryview]))(bytes(i % 2 for i in range(size)))
    )


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@settings(deadline=None)
@given(
    st.dictionaries(names, tensors(), max_size=6), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
)
def test_the_safetensors_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, held: dict[str, Tensor], said: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    path.write_bytes(safetensors_file(held, said))
    assert holds(path, held)
    with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        assert (file.metadata() or {}) == said


@settings(deadline=None)
@given(st.dictionaries(names, tensors(), max_size=6))
def test_torch_reads_it(held: dict[str, Tensor]) -> None:
    file = safetensors_file(held, {})
    assert {name: tuple(t.shape) for name, t in load(file).items()} == {name: t.shape for name, t in held.items()}


@given(st.dictionaries(names, tensors(), max_size=6))
def test_every_tensor_is_aligned_to_its_items(held: dict[str, Tensor]) -> None:
    file = safetensors_file(held, {})
    data = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:data])
    assert all((data + header[name]["data_offsets"][0]) % DTYPES[t.dtype] == 0 for name, t in held.items())


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("w", Tensor("F32", (3,), bytes(8)), "tensor w: 8 bytes; F32 \\(3,\\) takes 12"),
        ("w", Tensor("BF16", (), b""), "0 bytes; BF16 \\(\\) takes 2"),
        ("w", Tensor("bfloat16", (1,), bytes(2)), "dtype bfloat16"),
        ("__metadata__", Tensor("U8", (1,), bytes(1)), "__metadata__"),
    ],
)
def test_what_is_no_tensor_is_named(name: str, tensor: Tensor, match: str) -> None:
    with pytest.raises(WireError, match=match):
        safetensors_file({name: tensor}, {})


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(100, 3 * CHUNK))
def test_chunks_join_to_the_file(tmp_path_factory: pytest.TempPathFactory, chunks: int, chunk_bytes: int) -> None:
    update = outgoing(chunks=chunks, chunk_bytes=chunk_bytes)
    incoming = Incoming(update.header, tmp_path_factory.mktemp("join"))
    incoming.resume()
    for index in range(update.header.chunks):
        assert incoming.missing
        assert incoming.add(index, update.chunk(index))
    assert not incoming.missing
    incoming.finish(path := incoming.path.with_name("x.safetensors"))
    assert holds(path, drafter(0, chunks))
    assert [each.name for each in path.parent.iterdir()] == ["x.safetensors"]


@settings(deadline=None)
@given(st.integers(0, 11), st.data())
def test_what_is_left_of_an_earlier_life_is_kept_up_to_the_first_damage(
    tmp_path_factory: pytest.TempPathFactory, arrived: int, data: Any
) -> None:
    update = outgoing()
    first = Incoming(update.header, tmp_path_factory.mktemp("resume"))
    first.resume()
    for index in range(arrived):
        first.add(index, update.chunk(index))
    first.finish(end := first.path.with_name("end"))
    tail = data.draw(st.binary(max_size=20))  # of a write that was cut off, say
    left = bytearray(end.read_bytes()) + tail
    good = arrived - bool(tail and arrived == update.header.chunks)  # the last chunk then seems longer than it is
    if arrived and data.draw(st.booleans()):
        left[(damage := data.draw(st.integers(0, min(arrived * CHUNK, update.header.size) - 1)))] ^= 1
        good = min(good, damage // CHUNK)
    first.path.write_bytes(left)

    second = Incoming(update.header, first.path.parent)
    second.resume()
    assert second.next == good
    for index in range(good, update.header.chunks):
        assert second.add(index, update.chunk(index))
    second.finish(path := second.path.with_name("x.safetensors"))
    assert holds(path, drafter(0))


def test_a_chunk_out_of_turn_changes_nothing(tmp_path: Path) -> None:
    update = outgoing()
    incoming = Incoming(update.header, tmp_path)
    incoming.resume()
    assert not incoming.add(1, update.chunk(1))
    assert incoming.add(0, update.chunk(0))
    assert not incoming.add(0, update.chunk(0))
    assert incoming.path.read_bytes() == update.chunk(0)
    incoming.drop()


@pytest.mark.parametrize(
    "spoil", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"", lambda c: bytes([c[0] ^ 1]) + c[1:]]
)
def test_a_damaged_chunk_is_not_written(tmp_path: Path, spoil: Any) -> None:
    update = outgoing()
    incoming = Incoming(update.header, tmp_path)
    incoming.resume()
    with pytest.raises(WireError, match="chunk 0 of drafter 1"):
        incoming.add(0, spoil(bytes(update.chunk(0))))
    assert incoming.path.read_bytes() == b""
    incoming.drop()
    assert list(tmp_path.iterdir()) == []


def test_an_update_is_named_by_its_contents() -> None:
    assert outgoing(1).digest == outgoing(1).digest != outgoing(2).digest
    assert outgoing(1).digest != outgoing(1, chunk_bytes=2 * CHUNK).digest
