"""Our reader of safetensors reads what the library writes, and refuses what it would not have written."""

import contextlib
import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tlt_server.drafter.header import DTYPES, MOST_HEADER
from tlt_server.engine.loading.tensorfile import CHUNK, Buffer, TensorFile
from tlt_server.errors import UpdateRefused

ON_FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = st.text("abcdé./ ", min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(list(DTYPES.values()))), max_size=5)


def random(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


@ON_FILES
@given(TENSORS, st.booleans())
def test_what_the_library_writes_is_read(tmp_path: Path, specs: dict[str, tuple[list[int], torch.dtype]], meta: bool):
    tensors = {name: random(*spec) for name, spec in specs.items()}
    file = tmp_path / "m.safetensors"
    file.write_bytes(save(tensors, {"format": "pt"} if meta else None))
    read = TensorFile(file, Buffer())
    assert read.sha256() == hashlib.sha256(file.read_bytes()).hexdigest()
    found = read.tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


WHOLE = save({"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5), "c": torch.ones(3, dtype=torch.bfloat16)})


@ON_FILES
@given(st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, or with any byte changed: never an error of another kind."""
    damaged = bytearray(WHOLE)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(WHOLE) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(WHOLE) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    file = tmp_path / "m.safetensors"
    file.write_bytes(damaged)
    with contextlib.suppress(UpdateRefused):
        found = TensorFile(file, Buffer()).tensors()
        assert all(tensor.numel() * tensor.itemsize <= len(damaged) for tensor in found.values())


@pytest.mark.parametrize("length", [0, 7, 8, 50, len(WHOLE) - 1])
def test_every_cut_is_refused(tmp_path: Path, length: int) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(WHOLE[:length])
    with pytest.raises(SafetensorError), safe_open(file, "pt"):
        pass
    with pytest.raises(UpdateRefused, match=r"cut short|not a safetensors"):
        TensorFile(file, Buffer()).tensors()


def test_tensors_may_lie_anywhere(tmp_path: Path) -> None:
    """The format does not align them."""
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I64","shape":[],"data_offsets":[1,9]}}'
    )
    file = tmp_path / "m.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\x05" + (7).to_bytes(8, "little"))
    found = TensorFile(file, Buffer()).tensors()
    assert (found["a"].item(), found["b"].item()) == (5, 7)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("none", ".", "pipe", "endless", "a\0b"):
        with pytest.raises(UpdateRefused, match=r"No such file|not a regular file|NUL"):
            TensorFile(tmp_path / name, Buffer())


def test_one_that_is_larger_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    os.truncate(tmp_path / "m", 1 << 40)  # without a block of a disk
    with pytest.raises(UpdateRefused, match="1099511627776 bytes, where 1000 are the most"):
        TensorFile(tmp_path / "m", Buffer(), most=1000)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
            "over each other",
        ),
        (b'{"a":{"dtype":"U8","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}', "not its shape"),
        (b'{"a":{"dtype":"U8","shape":' + str([1] * 99).encode() + b',"data_offsets":[0,1]}}', "length <= 8"),
        (b'{"a":{"dtype":"U8","shape":[-1,-8],"data_offsets":[0,8]}}', ">= 0"),
        (b'{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,8]}}', "not a safetensors file"),
        (b'{"a":' * 100_000, "not a safetensors file"),
    ],
    ids=["one over the other", "a product beyond 64 bits", "many dimensions", "negative", "beyond 64 bits", "deep"],
)
def test_a_hostile_header_is_refused(tmp_path: Path, header: bytes, said: str) -> None:
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UpdateRefused, match=said):
        TensorFile(tmp_path / "m", Buffer()).tensors()


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes((MOST_HEADER + 1).to_bytes(8, "little"))
    os.truncate(tmp_path / "m", 2 * MOST_HEADER)
    with pytest.raises(UpdateRefused, match="not a safetensors file"):
        TensorFile(tmp_path / "m", Buffer()).tensors()


def test_the_bytes_are_its_own(tmp_path: Path) -> None:
    """Whatever becomes of the file: one that was mapped would end the process when it is cut short."""
    file = tmp_path / "m.safetensors"
    file.write_bytes(WHOLE)
    read = TensorFile(file, Buffer())
    file.write_bytes(b"")
    assert torch.equal(read.tensors()["b"], torch.arange(5))


@pytest.mark.slow
def test_one_buffer_serves_one_file_after_another(tmp_path: Path) -> None:
    """A smaller one and a larger one; and the hash is of all of a file that is read in several pieces."""
    buffer = Buffer()
    for length in (CHUNK // 4 + 7, 3, CHUNK // 2 + 1, 0):
        tensors = {"a": torch.randint(0, 1 << 40, (length,)), "b": torch.arange(length)}
        file = tmp_path / "m.safetensors"
        file.write_bytes(save(tensors))
        read = TensorFile(file, buffer)
        assert {name: tensor.tolist() for name, tensor in read.tensors().items()} == {
            name: tensor.tolist() for name, tensor in tensors.items()
        }
        assert read.sha256() == hashlib.sha256(file.read_bytes()).hexdigest()
