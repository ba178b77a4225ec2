"""Rows through the block of memory and into messages: none is overwritten before it is read, lost, or moved."""

import random
import subprocess
import sys
from collections import deque
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.features.pinned import PinnedBatch, PinnedMemory, Rows, States, cut
from tlt_server.engine.features.sender import Sender, merged
from tlt_server.process import free_port
from tlt_server.wire.features import FeatureBatch, FeatureHeader
from tlt_server.wire.features import Rows as Described
from tlt_server.wire.messages import ModelIdentity
from tlt_server.wire.sockets import Inlet, Outlet

WIDTH = 3
CPU = torch.device("cpu")


def header(rows: tuple[Described, ...], hidden: torch.Tensor, kind: str = "eagle") -> FeatureHeader:
    model = ModelIdentity("M", 2, 100)
    name = str(hidden.dtype).removeprefix("torch.")
    return FeatureHeader(server="s", model=model, kind=kind, dtype=name, width=WIDTH, rows=rows)  # type: ignore[arg-type]


def rows_of(rid: str, start: int, count: int, row: int = 0, version: int = 0, partial: bool = False) -> Rows:
    return Rows(rid, 7, 4, start, range(start, start + count), version, partial, row)


def numbered(count: int, finals: bool = False, dtype: torch.dtype = torch.float32) -> States:
    hidden = torch.arange(count, dtype=dtype)[:, None].expand(-1, WIDTH).contiguous()
    return States(hidden, hidden[:, :2] + 1 if finals else None)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_no_batch_is_overwritten_before_it_is_freed(seed: int, finals: bool) -> None:
    draw = random.Random(seed)
    pinned, waiting = PinnedMemory(CPU, size=2048), deque[tuple[PinnedBatch, list[int]]]()
    states, refused = numbered(100, finals), 0
    for _ in range(200):
        if waiting and draw.random() < 0.45:
            batch, expected = waiting.popleft()
            assert batch.states.hidden[:, 0].tolist() == expected
            if batch.states.finals is not None:
                assert batch.states.finals[:, 1].tolist() == [each + 1 for each in expected]
            pinned.free(batch)
            continue
        rows = [rows_of("a", 0, draw.randint(1, 10), row=draw.randint(0, 80)) for _ in range(draw.randint(1, 3))]
        if (sent := pinned.ship(rows, states)) is None:
            refused += 1
            assert waiting
        else:
            waiting.append((sent, [each.row + k for each in rows for k in range(len(each.tokens))]))
    assert all(batch.states.hidden[:, 0].tolist() == expected for batch, expected in waiting)


def test_a_batch_larger_than_the_block_has_no_room() -> None:
    assert PinnedMemory(CPU, size=1024).ship([rows_of("a", 0, 100)], numbered(100)) is None


ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=20)


@given(ROWS, st.integers(1, 7))
def test_a_cut_loses_nothing(given: list[tuple[str, int]], most: int) -> None:
    rows, at = [], 0
    for rid, count in given:
        rows.append(rows_of(rid, at, count, row=at))
        at += count
    lists = cut(rows, most)
    assert all(sum(len(each.tokens) for each in part) == most for part in lists[:-1])
    assert all(0 < sum(len(each.tokens) for each in part) <= most for part in lists)
    flat = [
        (each.rid, each.start + k, each.row + k, t)
        for part in lists
        for each in part
        for k, t in enumerate(each.tokens)
    ]
    assert flat == [(each.rid, each.start + k, each.row + k, t) for each in rows for k, t in enumerate(each.tokens)]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_message_holds_all_rows_once_in_long_pieces(seed: int, finals: bool, dtype: torch.dtype) -> None:
    """Interleaved steps of several requests; now and then one is computed again, or the target changes."""
    draw = random.Random(seed)
    pinned, held, wanted = PinnedMemory(CPU, size=1 << 16), [], []
    at, version = dict.fromkeys("abc", 0), 0
    for _ in range(draw.randint(1, 12)):
        rows, row = [], 0
        for rid in draw.sample("abc", draw.randint(1, 3)):
            count = draw.randint(1, 4)
            rows.append(rows_of(rid, at[rid], count, row, version))
            wanted += [(rid, version, at[rid] + k, row + k) for k in range(count)]
            at[rid], row = at[rid] + count, row + 5
        held.append(pinned.ship(rows, numbered(row, finals, dtype)))
        version += draw.random() < 0.2
        at["a"] -= at["a"] * (draw.random() < 0.2)
    kind = "eagle3" if finals else "eagle"
    frames = merged([each for each in held if each], lambda rows, hidden: header(rows, hidden, kind)).encode()
    batch = FeatureBatch.decode([bytes(each) for each in frames])
    tokens = torch.frombuffer(bytearray(batch.tokens), dtype=torch.int32).tolist()
    hidden = torch.frombuffer(bytearray(batch.hidden), dtype=dtype).view(-1, WIDTH)[:, -1].tolist()
    if finals:
        last = torch.frombuffer(bytearray(batch.finals), dtype=dtype).view(-1, 2)[:, 0].tolist()
        assert last == [each + 1 for each in hidden]
    found, index = [], 0
    for piece in batch.header.rows:
        for k in range(piece.count):
            assert tokens[index] == piece.start + k
            found.append((piece.rid, piece.target_version, piece.start + k, int(hidden[index])))
            index += 1
    assert sorted(found) == sorted(wanted)
    for rid in "abc":
        own = [piece for piece in batch.header.rows if piece.rid == rid]
        assert all(
            (one.target_version, one.start + one.count) != (other.target_version, other.start)
            for one, other in pairwise(own)
        )


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.slow
def test_what_is_taken_arrives(address: str) -> None:
    pinned, inlet = PinnedMemory(CPU, size=1 << 16), Inlet(address)
    sender = Sender(pinned, lambda: Outlet(address), header)
    tokens, sent = 0, 0
    for _ in range(100):  # until the two have met, and for a while after
        if (batch := pinned.ship([rows_of("a", sent, 3)], numbered(3))) is not None:
            sender.take(batch)
            sent += 3
        inlet.wait(0.02)
        while frames := inlet.receive():
            tokens += FeatureBatch.decode(frames).header.tokens
    sender.close()
    inlet.wait(1)
    while frames := inlet.receive():
        tokens += FeatureBatch.decode(frames).header.tokens
    inlet.close()
    assert 0 < tokens <= sent


def test_without_a_trainer_the_block_is_freed_all_the_same(address: str) -> None:
    pinned = PinnedMemory(CPU, size=1024)
    sender = Sender(pinned, lambda: Outlet(address), header)
    while (batch := pinned.ship([rows_of("a", 0, 3)], numbered(3))) is not None:
        sender.take(batch)
    sender.close()
    assert pinned.ship([rows_of("a", 0, 3)], numbered(3)) is not None


@pytest.mark.slow
def test_memory_is_taken_at_start_and_not_by_and_by() -> None:
    """In a process of its own: another's allocator may hold as much already."""
    script = (
        "import psutil, torch; from tlt_server.engine.features.pinned import PinnedMemory;"
        "before = psutil.Process().memory_info().rss; held = PinnedMemory(torch.device('cpu'), size=64 << 20);"
        "print(psutil.Process().memory_info().rss - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 60 << 20
