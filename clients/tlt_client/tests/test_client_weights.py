"""Tensors on their way to a server: in buckets, by shared memory or in a process group; and what fails."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_stand_in import Handler, Json, StandIn, control, says, serving

from tlt_client import AsyncClient, BadRequest, ConnectionLost, InvalidArgument, TorchNeeded

torch = pytest.importorskip("torch")

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # noqa: E402

from tlt_client.weights import group as groups  # noqa: E402
from tlt_client.weights import tensors as sending  # noqa: E402

Connect = Callable[..., Any]

TENSORS = {
    "small": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "matrix": torch.arange(10.0).reshape(2, 5).t(),
    "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "empty": torch.zeros(0, 4),
}

shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])


@st.composite
def named(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8))
    return {str(i): torch.randn(shape).mul(9).to(dtype) for i, (shape, dtype) in enumerate(drawn)}


@given(named(), st.integers(1, 400))
def test_buckets_hold_all_in_order_and_no_more_than_they_may(tensors: dict[str, Any], most: int) -> None:
    parts = list(sending.buckets(tensors, most))
    assert [pair for part in parts for pair in part] == list(tensors.items())
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        size = sum(tensor.nbytes for _, tensor in part)
        assert size <= most or len(part) == 1
        assert following is None or size + following[0][1].nbytes > most


@given(named())
def test_a_flat_bucket_is_read_where_its_places_say(tensors: dict[str, Any]) -> None:
    """Just as SGLang does: by `view`, which needs each tensor to begin at a multiple of its elements' size."""
    flat = sending.FlatBucket(list(tensors.items()))
    assert flat.data.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert {place.name for place in flat.places} == tensors.keys()
    for place in flat.places:
        read = flat.data[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
        assert torch.equal(read.nan_to_num(), tensors[place.name].nan_to_num())


def test_an_iterable_is_read_as_it_is_sent(connect: Connect) -> None:
    """One bucket is on its way, and one is known to follow."""
    taken: list[str] = []
    at: list[int] = []

    def lazily() -> Iterator[tuple[str, Any]]:
        for i in range(5):
            taken.append(str(i))
            yield str(i), torch.zeros(10)

    def seen(handler: Handler, fields: Json) -> None:
        at.append(len(taken))
        control(handler, fields)

    with serving() as server:
        server.control_acts["/update_weights_from_tensor"] = seen
        connect(server.url).update_weights_from_tensor(lazily(), "7", bucket_bytes=40)
    assert at == [3, 4, 5, 5, 5]


def test_tensors_go_in_buckets_of_which_the_last_flushes(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        before = shared()
        client.update_weights_from_tensor({str(i): torch.full((4,), float(i)) for i in range(3)}, "7", bucket_bytes=32)
        client.update_weights_from_tensor(TENSORS, flush_cache=False)
        calls = [fields for _, path, fields, key in server.other if path == "/update_weights_from_tensor"]
        assert [fields.pop("serialized_named_tensors").__len__() for fields in calls] == [2, 2, 2]  # one for each rank
        common = {"load_format": "flattened_bucket"}
        assert calls == [
            {**common, "flush_cache": False, "weight_version": "7"},
            {**common, "flush_cache": True, "weight_version": "7"},
            {**common, "flush_cache": False},
        ]
        assert {key for method, *_, key in server.other if method == "POST"} == {"Bearer admin"}
        assert shared() == before


def shared() -> set[Path]:
    """Files of torch's shared memory of this process."""
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


def test_a_refused_bucket_leaves_no_memory_behind_and_says_what_was_written(connect: Connect) -> None:
    answers = [says(200, {"success": True}), says(400, {"success": False, "message": "lm_head: NaN"})]
    tensors = {str(i): torch.zeros(4) for i in range(3)}
    with serving() as server:
        before = shared()

        def in_turn(*asked: Any) -> None:
            answers.pop(0)(*asked)

        server.control_acts["/update_weights_from_tensor"] = in_turn
        with pytest.raises(BadRequest, match=r"lm_head: NaN\. 1 bucket before it is written: send the whole target"):
            connect(server.url).update_weights_from_tensor(tensors, bucket_bytes=16)
        assert (answers, shared()) == ([], before)


@pytest.mark.parametrize(
    ("tensors", "sent", "message"),
    [({}, {}, "no tensor to send"), (TENSORS, {"bucket_bytes": 0}, "bucket_bytes=0")],
)
def test_a_wrong_argument_is_refused(connect: Connect, tensors: Any, sent: Any, message: str) -> None:
    with serving() as server, pytest.raises(InvalidArgument, match=message):
        connect(server.url).update_weights_from_tensor(tensors, **sent)


def test_memory_that_is_not_there_is_not_written(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write beyond the end of /dev/shm would end the process."""
    monkeypatch.setattr(sending, "SHARED", Path("/proc"))  # a file system without room
    with serving() as server, pytest.raises(InvalidArgument, match=r"a bucket of 57 bytes.*--shm-size"):
        connect(server.url).update_weights_from_tensor(TENSORS)


# -- process groups, whose other ranks are threads here --------------------------------------------------------------


@contextmanager
def ranks(server: StandIn, *sizes: int) -> Iterator[list["Future[list[list[int]]]"]]:
    """Two, which join when the server is asked to, and what they receive: buckets of these sizes."""
    received: list[Future[list[list[int]]]] = []
    there: list[ProcessGroupGloo] = []  # until the end, as a server's are: one that goes is missed by who still joins

    def receive(asked: Json, rank: int) -> list[list[int]]:
        name, limit = asked["group_name"], timedelta(seconds=20)
        store = TCPStore(asked["master_address"], asked["master_port"], 3, is_master=False, timeout=limit)
        for prefix in (name, f"{name}/", "cpu/"):  # as torch and SGLang nest them
            store = PrefixStore(prefix, store)
        there.append(group := ProcessGroupGloo(store, rank, 3, limit))
        buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for bucket in buckets:
            group.broadcast(bucket, 0).wait()
        return [bucket.tolist() for bucket in buckets]

    def join(handler: Handler, fields: Json) -> None:
        assert (fields["rank_offset"], fields["world_size"]) == (1, 3)
        received.extend(pool.submit(receive, fields, rank) for rank in (1, 2))
        control(handler, fields)

    server.control_acts["/init_weights_update_group"] = join
    with ThreadPoolExecutor(2) as pool:
        yield received


def test_tensors_are_broadcast_to_all_ranks(connect: Connect) -> None:
    first, second = {"a": torch.tensor([1, 2], dtype=torch.uint8)}, {"b": torch.tensor([3], dtype=torch.uint8)}
    with serving() as server, ranks(server, 2, 1) as received:
        client = connect(server.url)
        group = client.init_weights_update_group(backend="gloo")
        client.update_weights_from_distributed(group, first | second, "7", bucket_bytes=2)
        client.destroy_weights_update_group(group)
        assert [rank.result(timeout=30) for rank in received] == [[[1, 2], [3]]] * 2
        common = {"group_name": group.name, "load_format": "flattened_bucket", "weight_version": "7"}
        assert [fields for _, path, fields, _ in server.other if path == "/update_weights_from_distributed"] == [
            {**common, "flush_cache": False, "names": ["a"], "dtypes": ["uint8"], "shapes": [[2]]},
            {**common, "flush_cache": True, "names": ["b"], "dtypes": ["uint8"], "shapes": [[1]]},
        ]


def test_a_group_in_which_something_was_refused_is_not_used_again(connect: Connect) -> None:
    """Nobody can know whether the ranks have received what was refused."""
    tensors = {"a": torch.zeros(2, dtype=torch.uint8)}
    with serving() as server, ranks(server):
        client = connect(server.url)
        group = client.init_weights_update_group(backend="gloo")
        server.control_acts["/update_weights_from_distributed"] = says(400, {"success": False, "message": "no"})
        with pytest.raises(BadRequest, match="no"):
            client.update_weights_from_distributed(group, tensors)
        assert group.lost
        with pytest.raises(InvalidArgument, match="is lost: destroy"):
            client.update_weights_from_distributed(group, tensors)
        client.destroy_weights_update_group(group)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_not_waited_for_long(connect: Connect) -> None:
    with serving() as server:
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="did not join"):
            connect(server.url).init_weights_update_group(backend="gloo", within_s=0.2)
        assert time.monotonic() - began < 5


def test_a_group_that_the_server_refuses_is_not_waited_for(connect: Connect) -> None:
    """By no thread either: one that came back while the interpreter ends had the process aborted."""
    before = set(threading.enumerate())  # another test's broadcast may wait for ranks that are gone
    with serving() as server:
        server.control_acts["/init_weights_update_group"] = says(400, {"success": False, "message": "rank 1 of 1"})
        with pytest.raises(BadRequest, match="rank 1 of 1"):
            connect(server.url).init_weights_update_group(backend="gloo", within_s=30)
    left = [thread for thread in threading.enumerate() if thread.name == "tlt-client-group" and thread not in before]
    assert not [thread for thread in left if thread.join(1) or thread.is_alive()]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"backend": "mpi"}, "backend='mpi'"),
        ({"backend": "gloo", "master_address": "192.0.2.1"}, "master_address='192.0.2.1'"),
        *([] if torch.cuda.is_available() else [({}, "needs a CUDA device")]),
    ],
)
def test_a_group_that_cannot_be_is_refused(connect: Connect, where: dict[str, str], message: str) -> None:
    with serving() as server, pytest.raises(InvalidArgument, match=message):
        connect(server.url).init_weights_update_group(**where)


@pytest.mark.slow
def test_a_group_listens_where_it_is_told_to() -> None:
    opening = groups.Opening("127.0.0.1", 2, "gloo", 0.2)
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f":{opening.asked['master_port']:04X}"
    assert [line.split()[1] for line in listening.splitlines() if f"{port} 00000000:0000 0A" in line] == [
        f"0100007F{port}"
    ]
    with pytest.raises(ConnectionLost):
        opening.group()


# -- threads, and no torch ----------------------------------------------------------------------------------------


def test_the_event_loop_goes_on_while_tensors_are_gathered() -> None:
    def slowly() -> Iterator[tuple[str, Any]]:
        time.sleep(0.3)
        yield "a", torch.zeros(2)

    async def run(url: str) -> int:
        ticks = 0
        async with AsyncClient(url) as client:
            sent = asyncio.create_task(client.update_weights_from_tensor(slowly()))
            while not sent.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await sent
        return ticks

    with serving() as server:
        assert asyncio.run(run(server.url)) > 5


def test_without_torch_it_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with serving() as server:
        client = connect(server.url)
        for call in (lambda: client.update_weights_from_tensor({}), client.init_weights_update_group):
            with pytest.raises(TorchNeeded, match=r"pip install 'tlt-client\[weights\]'"):
                call()
        assert not server.other


def test_rollouts_need_no_torch() -> None:
    program = "import sys, tlt_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
