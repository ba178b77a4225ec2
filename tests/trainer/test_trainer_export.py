"""What a trainer exports: the weights that it had, where they come from, and what other engines need to know."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.drafter.test_loading import SHARED, fused
from tests.forks import ran
from tests.trainer.models import FOLDERS, TARGET_FOLDER, frozen
from tlt_server.config import DrafterKind
from tlt_server.drafter.folder import create
from tlt_server.errors import ConfigError
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.losses import EAGLE3
from tlt_server.trainer.publish.export import export
from tlt_server.trainer.publish.folder import Drafter, load_drafter
from tlt_server.trainer.publish.published import Published

PROVENANCE = {"target": "demo", "trained_on": "7", "steps": "3", "tokens": "900", "revision": "abc"}


def saved(drafter: Drafter, folder: Path) -> None:
    """A trainer's folder, with a checkpoint of weights that are not those of any folder yet."""
    with torch.no_grad():
        for weight in drafter.network.parameters():
            weight.add_(0.25)
    tensors, facts = Trainer(drafter.network, frozen(), EAGLE3).state()
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(3, tensors, facts | {"config": drafter.config, "provenance": PROVENANCE})
    checkpoints.close()


def with_its_own_head(folder: Path) -> Path:
    folder.mkdir()
    (folder / "counts.json").write_text('{"7": 3, "90": 2, "8": 1}')
    create(str(TARGET_FOLDER), folder / "in", DrafterKind.EAGLE3, (3, folder / "counts.json"))
    return folder / "in"


@pytest.mark.server  # SGLang's own classes load them: no server runs
def test_sglang_loads_what_a_checkpoint_holds(tmp_path: Path) -> None:
    sources = {**FOLDERS, "reduced": with_its_own_head(tmp_path / "made")}
    for name, source in sources.items():
        saved(load_drafter(source), tmp_path / name)
        assert export(tmp_path / name, tmp_path / f"{name}-out", checkpointed=True) == PROVENANCE
    outs = [tmp_path / f"{name}-out" for name in sources]
    log = tmp_path / "log"
    assert ran(list(map(str, outs)), log, "tests.drafter.loading") == 0, log.read_text()
    for source, out in zip(sources.values(), outs, strict=True):
        written, held = load_file(out / "model.safetensors"), load_file(out / "loaded.safetensors")
        before = load_file(source / "model.safetensors")
        assert not torch.equal(written["fc.weight"], before["fc.weight"])
        for parameter in held.keys() - SHARED - {"hot_token_id"}:
            assert torch.equal(held[parameter], fused(written, parameter.removeprefix("model."))), parameter
        assert written.keys() <= {"d2t", "t2d", "lm_head.weight"}, "SGLang has no place for these"


def test_an_export_says_what_is_known_of_it(tmp_path: Path) -> None:
    published, drafter = Published(tmp_path), load_drafter(FOLDERS["eagle3"])
    edition = published.add(drafter, 5, PROVENANCE)
    assert (edition.version, edition.trained_on, edition.steps) == (5, 7, 3)
    said = export(tmp_path, tmp_path / "out")
    assert said.items() >= (PROVENANCE | {"version": "5"}).items()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == said | {"form": "sglang"}
    layers = json.loads((tmp_path / "out" / "config.json").read_text())
    counted = layers["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in counted]
    assert load_drafter(tmp_path / "out").weights().keys() == drafter.weights().keys()


@pytest.mark.parametrize(("checkpointed", "said"), [(False, "no drafter was published"), (True, "no checkpoint")])
def test_nothing_to_export(tmp_path: Path, checkpointed: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        export(tmp_path, tmp_path / "out", checkpointed=checkpointed)
