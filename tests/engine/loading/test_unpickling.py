"""What trainers send tensors in is read, and nothing in it runs."""

import contextlib
import io
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tlt_client.weights.tensors import FlatBucket

from benchmarks.lib.safety.chains import Call, gadgets
from benchmarks.lib.safety.gadgets import legitimate, listening, serialized
from tests.forks import FORKS
from tlt_server.engine.loading.unpickling import MAKES, NAMES, unpickled
from tlt_server.errors import UpdateRefused

TENSOR = torch.arange(12, dtype=torch.float32).reshape(3, 4)
WHOLE = pickle.dumps([("a", torch.zeros(3))])  # once: it names a storage by its address, of more digits or fewer


@pytest.fixture(autouse=True)
def _shared_by_file() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def run_all(payloads: list[bytes], done: Any) -> None:
    """In a process of its own: some end it."""
    for at, payload in enumerate(payloads):
        done.value = at + 1
        with contextlib.suppress(Exception):
            pickle.loads(payload)


@pytest.mark.slow
def test_no_gadget_runs(tmp_path: Path) -> None:
    """Each does its harm where `pickle` reads it, and none here."""
    with listening(tmp_path / "socket") as (port, path, connections):
        (tmp_path / "here").mkdir()
        for name, marker, payload in gadgets(tmp_path / "here", port, path):
            with pytest.raises(UpdateRefused):
                unpickled(payload)
            assert not marker.exists(), name
        assert not connections
        (tmp_path / "there").mkdir()
        there = list(gadgets(tmp_path / "there", port, path))
        done = FORKS.Value("i", 0)
        child = FORKS.Process(target=run_all, args=([payload for _, _, payload in there], done))
        child.start()
        child.join(60)
        assert done.value == len(there)
        harmless = [name for name, marker, _ in there if not marker.exists()]
    assert len(connections) >= len(harmless), harmless
    assert len(there) >= 40


def test_what_trainers_send_is_read() -> None:
    for fields in legitimate().values():
        (payload,) = fields["serialized_named_tensors"]
        assert unpickled(payload)


def test_what_the_client_sends_is_read() -> None:
    """Whichever way of sharing the trainer's process has; and SGLang's bucket takes it apart again."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    dtypes = (torch.bfloat16, torch.float64, torch.bool, torch.float8_e4m3fn, torch.float32, torch.int64)
    sent = {str(dtype): TENSOR[:, :3].to(dtype).T for dtype in dtypes} | {"scalar": torch.tensor(1.5)}
    flat = FlatBucket(list(sent.items()))
    for payload in flat.serialized(2):
        read = unpickled(payload)
        bucket = FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=read["metadata"])
        taken = dict(bucket.reconstruct_tensors())
        assert taken.keys() == sent.keys()
        assert all(taken[name].dtype == sent[name].dtype for name in sent)
        assert all(torch.equal(taken[name].float(), sent[name].float()) for name in sent)
    flat.unlink()


def read_by_all() -> None:
    flat = FlatBucket([("a", torch.ones(4096))])
    (payload,) = flat.serialized(1)
    for _ in range(9):
        assert unpickled(payload)["flattened_tensor"].numel()
    flat.unlink()


@pytest.mark.slow
def test_all_members_of_a_fleet_may_read_it() -> None:
    """In a process of its own: torch would end it, where a reader too many had removed the file."""
    child = FORKS.Process(target=read_by_all)
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_come_as_they_were(dtype: torch.dtype) -> None:
    sent = OrderedDict(
        a=TENSOR.to(dtype),
        view=TENSOR.to(dtype)[:, 1:3],
        turned=TENSOR.to(dtype).T,
        empty=TENSOR.to(dtype)[:0],
        nested=[torch.Size([1, 2]), torch.device("cuda:1"), dtype, None, {"x": (1.5, b"y", 2**70)}],
    )
    read = unpickled(serialized(sent))
    assert read["nested"] == sent["nested"]
    for key in ("a", "view", "turned", "empty"):
        assert (read[key].dtype, read[key].stride()) == (dtype, sent[key].stride())
        assert torch.equal(read[key].float(), sent[key].float())


def test_a_parameter_stays_one() -> None:
    for payload in (serialized(torch.nn.Parameter(TENSOR)), pickle.dumps(torch.nn.Parameter(TENSOR))):
        read = unpickled(payload)
        assert isinstance(read, torch.nn.Parameter)
        assert torch.equal(read, TENSOR)


def test_a_descriptor_is_refused_with_the_remedy() -> None:
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    with pytest.raises(UpdateRefused, match="set_sharing_strategy"):
        unpickled(serialized(TENSOR.clone()))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (13,), (1,)), (1, (3, 4), (4, 1)), (-1, (1,), (1,)), (0, (2,), (2**61,)), (0, (1,), ()), (0, (2,), (12,))],
)
def test_a_view_stays_within_its_storage(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    shared = TENSOR.clone()
    storage = shared._typed_storage()
    rebuild = torch.multiprocessing.reductions.rebuild_tensor
    payload = serialized(Call(rebuild, torch.Tensor, storage, (offset, size, stride, False)))
    with pytest.raises(UpdateRefused):
        unpickled(payload)


def test_a_storage_stays_within_its_file() -> None:
    """What is mapped beyond a file's end kills who reads it."""
    shared = TENSOR.clone()
    manager, handle, size = shared.untyped_storage()._share_filename_cpu_()
    rebuild = torch.multiprocessing.reductions.rebuild_storage_filename
    for name, asked in ((handle, size + (1 << 20)), (b"/torch_1_2_3", 4), (b"/../tmp/x", 4), (handle, -1)):
        with pytest.raises(UpdateRefused):
            unpickled(serialized(Call(rebuild, torch.UntypedStorage, manager, name, asked)))


def test_no_name_leads_further() -> None:
    """What may be called is ours, and what may be named cannot be called."""
    assert all(make.__module__ == "tlt_server.engine.loading.unpickling" for make in MAKES.values())
    for module, name in NAMES:
        payload = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b")R."
        with pytest.raises(UpdateRefused):
            unpickled(payload)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    payload = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UpdateRefused):
        unpickled(bytes(payload))


def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    """Torch's oldest format, which upstream reads as a pickle that may run anything."""
    from sglang.srt.model_loader.weight_utils import pt_weights_iterator

    marker, path = tmp_path / "marker", tmp_path / "pytorch_model.bin"
    evil = pickle.dumps(Call(Path.touch, Path(marker)))
    with tarfile.open(path, "w") as archive:
        for name, content in (("storages", pickle.dumps(0)), ("tensors", pickle.dumps(0)), ("pickle", evil)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with pytest.raises((RuntimeError, pickle.UnpicklingError)):
        list(pt_weights_iterator([str(path)]))
    assert not marker.exists()
