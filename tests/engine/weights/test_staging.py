"""Staging, on a model of two layers: what is refused, and that it waits while memory is released."""

import hashlib
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tlt_server.engine.loading.schema import schema_of
from tlt_server.engine.weights import swap
from tlt_server.engine.weights.swap import DrafterWeights
from tlt_server.errors import UpdateRefused

TENSORS = {"embed.weight": torch.zeros(4, 2), "fc.weight": torch.arange(4.0).reshape(2, 2), "norm": torch.ones(2)}


class Drafter(nn.Module):
    """Its embedding is the target's."""

    def __init__(self, embed: nn.Parameter) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.embed.weight = embed
        self.fc = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.norm = nn.Parameter(torch.ones(2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)


def saved(folder: Path, **changed: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 2}))
    save_file(TENSORS | {name.replace("_", "."): tensor for name, tensor in changed.items()}, folder / "m.safetensors")
    return folder


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrafterWeights:
    """As a server's that was started from a checkpoint of these tensors; SGLang's loader, which finds it, needs one."""
    monkeypatch.setattr(swap, "start_schema", lambda runner: schema_of(TENSORS.items()))
    target = nn.Embedding(4, 2).requires_grad_(False)
    config = SimpleNamespace(model_path=str(saved(tmp_path / "start")), revision=None, quantization=None, vocab_size=4)
    runner = SimpleNamespace(
        model=Drafter(target.weight),
        model_config=config,
        memory_saver_adapter=SimpleNamespace(region=lambda tag, enable_cpu_backup: nullcontext()),
    )
    target_runner = SimpleNamespace(model=target, model_config=SimpleNamespace(model_path="target", vocab_size=4))
    worker = SimpleNamespace(
        draft_runner=runner,
        target_worker=SimpleNamespace(model_runner=target_runner),
        hot_token_id=None,
        vocabulary=None,
        noise=SimpleNamespace(forget=lambda: None),
    )
    return DrafterWeights(worker)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["fc.weight", "norm"])
def test_what_is_not_finite_is_refused(weights: DrafterWeights, tmp_path: Path, name: str, value: float) -> None:
    tensor = TENSORS[name].clone()
    tensor.view(-1)[-1] = value
    with pytest.raises(UpdateRefused, match=f"{name} holds NaN or infinity"):
        weights.stage(saved(tmp_path / "bad", **{name.replace(".", "_"): tensor}), None)


def test_a_file_that_is_not_the_one_that_was_meant(weights: DrafterWeights, tmp_path: Path) -> None:
    folder = saved(tmp_path / "other", norm=torch.full((2,), 3e38))  # whose sum would be infinite
    digest = hashlib.sha256((folder / "m.safetensors").read_bytes()).hexdigest()
    assert weights.stage(folder, digest.upper()) == weights.stage(folder, None) == digest
    with pytest.raises(UpdateRefused, match=f"its sha256 is {digest}, not {'0' * 64}"):
        weights.stage(folder, "0" * 64)


def test_staging_waits_while_memory_is_released(weights: DrafterWeights, tmp_path: Path) -> None:
    """It would write into memory that is no longer there; and who releases it waits for what is being written."""
    folder, loading, on = saved(tmp_path / "other"), threading.Event(), threading.Event()
    shadow = weights._shadow
    load = shadow.load_weights

    def slow(items: Iterable[tuple[str, torch.Tensor]]) -> None:
        loading.set()
        assert on.wait(10)
        load(items)

    shadow.load_weights = slow
    with ThreadPoolExecutor(2) as pool:
        staging = pool.submit(weights.stage, folder, None)
        assert loading.wait(10)
        releasing = pool.submit(weights.hold_staging)
        assert not releasing.done()
        on.set()
        assert staging.result(10)
        releasing.result(10)
        loading.clear()
        another = pool.submit(weights.stage, folder, None)
        assert not loading.wait(0.1)
        weights.let_stage()
        assert another.result(10)
