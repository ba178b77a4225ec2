"""A schema takes exactly what can stand in a checkpoint's place."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tlt_server.engine.loading.schema import FLOATS, Spec, schema_if_readable, schema_of, tensors_in

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([*FLOATS, torch.int64, torch.int8, torch.float8_e4m3fn, torch.bool])
SPECS = st.builds(Spec, SHAPES, DTYPES)


@given(SPECS, SPECS)
def test_what_fits(expected: Spec, other: Spec) -> None:
    cast = expected.dtype == other.dtype or (expected.dtype in FLOATS and other.dtype in FLOATS)
    why = expected.misfit(other)
    assert (why is None) == (expected.shape == other.shape and cast)
    assert why is None or str(list(other.shape)) in why or str(other.dtype) in why


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_checkpoint_is_read_whatever_its_format(tmp_path: Path, kind: str) -> None:
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "d2t": torch.arange(4)}
    file = tmp_path / f"model.{kind}"
    save_file(tensors, file) if kind == "safetensors" else torch.save(tensors, file)
    assert schema_of(tensors_in([file])) == {
        "a.weight": Spec((2, 3), torch.float32),
        "d2t": Spec((4,), torch.int64),
    }
    assert torch.equal(dict(tensors_in([file]))["a.weight"], tensors["a.weight"])


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    torch.save({"a": torch.ones(1), "code": Path}, file)
    with pytest.raises(Exception, match="weights_only"):
        list(tensors_in([file]))


def test_a_checkpoint_that_only_sglang_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In torch's old format, which cannot be mapped: the server starts, with nothing to hold names against."""
    file = tmp_path / "model.bin"
    torch.save({"a": torch.ones(1)}, file, _use_new_zipfile_serialization=False)
    assert schema_if_readable("odd", lambda: [file]) is None
    assert "odd: its names and shapes cannot be read" in caplog.text
    torch.save({"a": torch.ones(1)}, file)
    assert schema_if_readable("even", lambda: [file]) == {"a": Spec((1,), torch.float32)}
