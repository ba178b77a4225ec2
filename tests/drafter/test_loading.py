"""SGLang's own classes load what we write: all of it, and nothing of theirs but what is the target's goes without."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafter.conftest import FAMILIES
from tests.forks import ran
from tlt_server.config import DrafterKind
from tlt_server.drafter.folder import create

pytestmark = pytest.mark.server
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SHARED = {"model.embed_tokens.weight", "lm_head.weight"}
MADE = [f"{family}-{kind}" for family, kind in product(FAMILIES, DrafterKind)]


@pytest.fixture(scope="module")
def loaded(targets: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters of every family and kind, and one with a vocabulary of its own; one process has loaded them all."""
    base = tmp_path_factory.mktemp("drafters")
    for family, kind in product(FAMILIES, DrafterKind):
        create(str(targets[family]), base / f"{family}-{kind}", kind)
    (base / "counts.json").write_text('{"7": 3, "90": 2, "8": 1}')
    create(str(targets["qwen2"]), base / "reduced", DrafterKind.EAGLE3, (3, base / "counts.json"))
    folders = [str(base / name) for name in (*MADE, "reduced")]
    log = base / "log"
    assert ran(folders, log, "tests.drafter.loading") == 0, log.read_text()
    return base


def fused(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """What SGLang's parameter `name` is made of, from a checkpoint's tensors."""
    for whole, parts in FUSED.items():
        if whole in name:
            return torch.cat([tensors.pop(name.replace(whole, part)) for part in parts])
    return tensors.pop(name)


@pytest.mark.parametrize("name", MADE)
def test_every_tensor_arrives(loaded: Path, name: str) -> None:
    written, held = load_file(loaded / name / "model.safetensors"), load_file(loaded / name / "loaded.safetensors")
    for parameter in held.keys() - SHARED:
        torch.testing.assert_close(held[parameter], fused(written, parameter.removeprefix("model.")), rtol=0, atol=0)
    assert not written, "SGLang has no place for these"


def test_a_vocabulary_of_its_own_arrives(loaded: Path, targets: Mapping[str, Path]) -> None:
    held = load_file(loaded / "reduced" / "loaded.safetensors")
    target = load_file(targets["qwen2"] / "model.safetensors")
    assert held["hot_token_id"].tolist() == [7, 8, 90]
    assert held["lm_head.weight"][:3].equal(target["model.embed_tokens.weight"][[7, 8, 90]])
