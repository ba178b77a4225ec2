"""A drafter's config follows from the target's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drafter.conftest import FAMILIES, write_config
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.drafter.config import drafter_config, eagle3_layers
from tlt_server.drafter.target import find_target
from tlt_server.errors import ConfigError


def made(target: Path, kind: DrafterKind, draft_vocab: int | None = None) -> dict[str, Any]:
    """The config.json of a drafter for a target."""
    config: dict[str, Any] = json.loads(drafter_config(find_target(str(target))[1], kind, draft_vocab).to_json())
    return config


@pytest.mark.parametrize(
    ("family", "kind", "architecture", "model_type"),
    [
        ("llama", DrafterKind.EAGLE, "LlamaForCausalLMEagle", "llama"),
        ("qwen2", DrafterKind.EAGLE, "Qwen2ForCausalLMEagle", "qwen2"),
        ("qwen3", DrafterKind.EAGLE, "LlamaForCausalLMEagle", "llama"),
        *((family, DrafterKind.EAGLE3, "LlamaForCausalLMEagle3", "llama") for family in FAMILIES),
    ],
)
def test_classes(
    targets: Mapping[str, Path], family: str, kind: DrafterKind, architecture: str, model_type: str
) -> None:
    config = made(targets[family], kind)
    assert (config["architectures"], config["model_type"]) == ([architecture], model_type)


@pytest.mark.parametrize("architecture", ["ApertusForCausalLM", "MiMoForCausalLM", "Exaone4ForCausalLM"])
def test_a_class_that_offers_what_it_takes_is_drafted_for(architecture: str, tmp_path: Path) -> None:
    """Whether tests have tried it is a line in the log."""
    config = made(write_config(tmp_path, architectures=[architecture]), DrafterKind.EAGLE)
    assert config["architectures"] == ["LlamaForCausalLMEagle"]


def test_the_embedded_drafters_are_what_we_would_make() -> None:
    target, drafter = default_paths()
    for kind, folder in zip(DrafterKind, (drafter, eagle3_path()), strict=True):
        theirs = json.loads((folder / "config.json").read_text())
        config = made(target, kind)
        assert config == {key: theirs[key] for key in config}


def test_both_spellings_of_what_transformers_renamed(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = write_config(
        tmp_path / "4", torch_dtype="bfloat16", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling
    )
    new = write_config(tmp_path / "5", dtype="bfloat16", rope_parameters=scaling | {"rope_theta": 5e5})
    assert made(old, DrafterKind.EAGLE)["dtype"] == made(new, DrafterKind.EAGLE)["dtype"] == "bfloat16"
    assert made(old, DrafterKind.EAGLE)["rope_scaling"] == scaling
    assert made(old, DrafterKind.EAGLE)["rope_theta"] == 5e5
    assert made(new, DrafterKind.EAGLE)["rope_parameters"] == scaling | {"rope_theta": 5e5}


def test_sizes_that_a_target_leaves_open(tmp_path: Path) -> None:
    config = made(write_config(tmp_path, head_dim=None, num_key_value_heads=None), DrafterKind.EAGLE)
    assert (config["head_dim"], config["num_key_value_heads"], config["dtype"]) == (16, 4, "float32")


@given(st.integers(4, 200))
def test_eagle3_reads_three_layers_before_the_last(layers: int) -> None:
    chosen = eagle3_layers(layers)
    assert len(set(chosen)) == 3
    assert 0 <= min(chosen) <= max(chosen) < layers - 1
    assert list(chosen) == sorted(chosen)
    if layers > 6:  # SGLang counts the layer that reads the output
        assert chosen == (2 - 1, layers // 2 - 1, layers - 3 - 1)


@pytest.mark.parametrize(
    ("changes", "kind", "draft_vocab", "said"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle", None, "SGLang has no language model of that class"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "eagle", None, "no language model of that class"),
        ({"architectures": None}, "eagle", None, "no eagle drafter for a target without architectures"),
        ({"architectures": ["MixtralForCausalLM"]}, "eagle", None, r"give its embedding.*Serve it with --no-spec"),
        ({"architectures": ["Exaone4ForCausalLM"]}, "eagle3", None, r"middle layers away.*Take an eagle drafter"),
        ({"architectures": ["MiMoForCausalLM"]}, "eagle3", None, "set_eagle3_layers_to_capture"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "eagle", None, "a sliding window were not shown"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 8}, "eagle", None, "MLA"),
        ({"hidden_size": None}, "eagle", None, r"config\.json: .*`hidden_size`"),
        ({"hidden_size": 0}, "eagle", None, r"config\.json: .*>= 1 - at `\$\.hidden_size`"),
        ({"dtype": "float8_e4m3fn"}, "eagle", None, r"config\.json: .*'float8_e4m3fn' - at `\$\.dtype`"),
        ({"num_hidden_layers": 3}, "eagle3", None, "the target has 3 in all"),
        ({}, "eagle", 10, "EAGLE has the target's head"),
        ({}, "eagle3", 0, "must lie between 1 and 95"),
        ({}, "eagle3", 96, "must lie between 1 and 95"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, changes: dict[str, Any], kind: str, draft_vocab: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(write_config(tmp_path, **changes), DrafterKind(kind), draft_vocab)
