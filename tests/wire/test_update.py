"""A drafter as bytes: a file that the safetensors library reads, cut and joined again."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.ends import CHUNK, drafter, holds, outgoing
from tlt_server.errors import WireError
from tlt_server.wire.files import Incoming


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(100, 3 * CHUNK))
def test_chunks_join_to_the_file(tmp_path_factory: pytest.TempPathFactory, chunks: int, chunk_bytes: int) -> None:
    update = outgoing(chunks=chunks, chunk_bytes=chunk_bytes)
    incoming = Incoming(update.header, tmp_path_factory.mktemp("join"))
    incoming.resume()
    for index in range(update.header.chunks):
        assert incoming.missing
        incoming.add(update.chunks[index], 0.0)
    assert not incoming.missing
    assert holds(incoming.path, drafter(0, chunks))
    assert list(incoming.path.parent.iterdir()) == [incoming.path]


@settings(deadline=None)
@given(st.integers(0, 11), st.data())
def test_what_is_left_of_an_earlier_life_is_kept_up_to_the_first_damage(
    tmp_path_factory: pytest.TempPathFactory, arrived: int, data: Any
) -> None:
    update = outgoing()
    first = Incoming(update.header, tmp_path_factory.mktemp("resume"))
    first.resume()
    for index in range(arrived):
        first.add(update.chunks[index], 0.0)
    tail = data.draw(st.binary(max_size=20))  # of a write that was cut off, say
    left = bytearray(first.path.read_bytes()) + tail
    good = arrived - bool(tail and arrived == update.header.chunks)  # the last chunk then seems longer than it is
    if arrived and data.draw(st.booleans()):
        left[(damage := data.draw(st.integers(0, min(arrived * CHUNK, update.header.size) - 1)))] ^= 1
        good = min(good, damage // CHUNK)
    first.path.write_bytes(left)

    second = Incoming(update.header, first.path.parent)
    second.resume()
    assert second.next == good
    for index in range(good, update.header.chunks):
        second.add(update.chunks[index], 0.0)
    assert holds(second.path, drafter(0))


@pytest.mark.parametrize(
    "spoil", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"", lambda c: bytes([c[0] ^ 1]) + c[1:]]
)
def test_a_damaged_chunk_is_not_written(tmp_path: Path, spoil: Any) -> None:
    update = outgoing()
    incoming = Incoming(update.header, tmp_path)
    incoming.resume()
    with pytest.raises(WireError, match="chunk 0 of drafter 1"):
        incoming.add(spoil(bytes(update.chunks[0])), 0.0)
    assert incoming.path.read_bytes() == b""


def test_a_file_that_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    update = outgoing()
    incoming = Incoming(update.header, tmp_path)
    incoming.resume()
    incoming.add(update.chunks[0], 0.0)
    incoming.path.unlink()
    with pytest.raises(FileNotFoundError):
        incoming.add(update.chunks[1], 0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_update_is_named_by_its_version_and_contents() -> None:
    assert outgoing(1).digest == outgoing(1).digest != outgoing(2).digest
    assert outgoing(1).digest != outgoing(1, version=2).digest
    assert outgoing(1).digest != outgoing(1, chunk_bytes=2 * CHUNK).digest
