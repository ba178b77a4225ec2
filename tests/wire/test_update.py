"""A drafter as bytes: a file that the safetensors library reads, cut and joined again."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.ends import CHUNK, drafter, holds, outgoing
from tlt_server.errors import WireError
from tlt_server.wire.update import Incoming


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
