"""Folders in and out, for every family and kind of drafter that can be made."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.drafter.conftest import FAMILIES, write_config
from tests.trainer.models import FOLDERS, TARGET_FOLDER, frozen
from tlt_server.config import DrafterKind
from tlt_server.drafter.folder import create
from tlt_server.drafter.networks import Rope
from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.network import network
from tlt_server.trainer.publish.folder import load_drafter, load_frozen

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def assert_same_files(one: Path, other: Path) -> None:
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name])


@pytest.mark.parametrize(("family", "kind"), list(product(FAMILIES, DrafterKind)))
def test_an_untrained_drafter_goes_in_and_out_unchanged(family: str, kind: DrafterKind, tmp_path: Path) -> None:
    changes = {"model_type": family, "architectures": [ARCHITECTURES[family]], "dtype": "bfloat16"}
    made = create(str(write_config(tmp_path / "target", **changes)), tmp_path / "in", kind)
    assert made.model_type
    load_drafter(tmp_path / "in").export(tmp_path / "out", {})
    assert_same_files(tmp_path / "in", tmp_path / "out")


def test_a_vocabulary_of_its_own_goes_in_and_out_unchanged(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text('{"7": 3, "90": 2, "8": 1}')
    vocabulary = (3, tmp_path / "counts.json")
    create(str(TARGET_FOLDER), tmp_path / "in", DrafterKind.EAGLE3, vocabulary)
    drafter = load_drafter(tmp_path / "in")
    assert drafter.network.draft_tokens is not None
    assert drafter.network.draft_tokens.tolist() == [7, 8, 90]
    drafter.export(tmp_path / "out", {})
    assert_same_files(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_export_says_where_it_comes_from(kind: str, tmp_path: Path) -> None:
    load_drafter(FOLDERS[kind]).export(tmp_path / "out", {"target": "demo", "target_version": "3"})
    assert_same_files(FOLDERS[kind], tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["made_by"].startswith("tlt-server ")
    assert (metadata["format"], metadata["trained"], metadata["target"], metadata["target_version"]) == (
        "pt",
        "yes",
        "demo",
        "3",
    )
    with pytest.raises(ConfigError, match="out: exists"):
        load_drafter(FOLDERS[kind]).export(tmp_path / "out", {})


def test_a_folder_whose_tensors_do_not_fit_its_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((FOLDERS["eagle"] / "config.json").read_bytes())
    tensors = load_file(FOLDERS["eagle"] / "model.safetensors")
    gone = "layers.0.mlp.up_proj.weight"
    save_file({name: x for name, x in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"drafter .*{gone} is missing"):
        load_drafter(tmp_path)
    save_file({**tensors, gone: torch.ones(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"drafter .*{gone}"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"norm_before_fc": True}, "norm_before_fc True"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc True"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type dynamic"),
    ],
)
def test_a_drafter_that_would_be_served_otherwise_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        network(json.loads((FOLDERS["eagle3"] / "config.json").read_text()) | change)


def test_biases_are_those_of_the_class_that_serves() -> None:
    eagle = json.loads((FOLDERS["eagle"] / "config.json").read_text())
    biases = {
        name: {key.split(".")[-2] for key in network(eagle | change).state_dict() if key.endswith("proj.bias")}
        for name, change in {
            "llama": {"attention_bias": True},
            "qwen2": {"architectures": ["Qwen2ForCausalLMEagle"], "attention_bias": None},
        }.items()
    }
    assert biases == {"llama": {"q_proj", "k_proj", "v_proj", "o_proj"}, "qwen2": {"q_proj", "k_proj", "v_proj"}}


def test_frozen_tensors_are_the_targets(tmp_path: Path) -> None:
    read = load_frozen(TARGET_FOLDER, version=4)
    assert read.version == 4
    assert torch.equal(read.embedding, frozen().embedding)
    assert torch.equal(read.head, frozen().head)
    save_file({"model.embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    tied = load_frozen(tmp_path, version=0)
    assert torch.equal(tied.head, tied.embedding)


SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 32.0},
    "yarn of DeepSeek": {"factor": 40.0, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotations_are_transformers(name: str, style: str) -> None:
    kind = name.partition(" ")[0]
    scaling = {"rope_type": kind, "original_max_position_embeddings": 512, **SCALINGS[name]}
    parameters = scaling | {"rope_theta": 500_000.0}
    theirs = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    config = {style: parameters} if style == "rope_parameters" else {style: scaling, "rope_theta": 500_000.0}
    cos, sin = Rope(config, 64)(torch.tensor([0, 700]))
    torch.testing.assert_close(cos[1, :32], (700 * frequencies).cos() * scale, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin[1, :32], (700 * frequencies).sin() * scale, rtol=1e-4, atol=1e-4)
