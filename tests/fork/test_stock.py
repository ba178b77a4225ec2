"""What we export is loaded by SGLang 0.5.17 as it was released, without a patch of ours."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models.formats import EAGLE, FORMATS, TARGET
from tests.drafter.test_loading import SHARED, fused
from tlt_server.config import DrafterForm
from tlt_server.drafter.export import Exported, export
from tlt_server.drafter.published import read

pytestmark = pytest.mark.server  # no server runs, and SGLang's import takes as long as a start
SOURCES = ("EAGLE", "SpecForge", "ModelOpt, the target's head", "EAGLE-3, two layers")


@pytest.fixture(scope="module")
def stock(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with upstream's package alone."""
    folder = tmp_path_factory.mktemp("stock")
    with ZipFile(pristine) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("sglang")])
    return folder


def test_stock_sglang_loads_all_that_an_export_holds(stock: Path, tmp_path: Path) -> None:
    outs = []
    for number, name in enumerate(SOURCES):
        source = EAGLE if name == "EAGLE" else tmp_path / f"in-{number}"
        if name in FORMATS:
            FORMATS[name](source)
        outs.append(tmp_path / f"out-{number}")
        export(Exported.of(read(source)), DrafterForm.SGLANG, outs[-1], str(TARGET))
    path = os.pathsep.join([str(stock), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.drafter.loading", "--stock", *map(str, outs)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert str(stock) in done.stdout
    for out in outs:
        held, written = load_file(out / "loaded.safetensors"), load_file(out / "model.safetensors")
        of_target = SHARED if "lm_head.weight" not in written else SHARED - {"lm_head.weight"}
        for parameter in held.keys() - of_target - {"hot_token_id"}:
            expected = fused(written, parameter.removeprefix("model."))
            assert torch.equal(held[parameter][: len(expected)], expected), parameter  # a head's rows are padded
        assert written.keys() <= {"d2t", "t2d"}, "SGLang has no place for these"
        if "d2t" in written:
            assert held["hot_token_id"].equal(written["d2t"] + torch.arange(len(written["d2t"])))
