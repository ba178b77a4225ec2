"""Tiny targets of each family, as transformers writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES = ("llama", "qwen2", "qwen3")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A folder with config and random weights for each family.

    Qwen2's embedding is its head too, and its heads are what their number makes them: SGLang serves no other on a CPU.
    """
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    torch.manual_seed(0)
    for family, folder in folders.items():
        own = {"tie_word_embeddings": True, "head_dim": 16} if family == "qwen2" else {}
        config = AutoConfig.for_model(family, **SIZES | own)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folders


def write_config(folder: Path, **changes: Any) -> Path:
    """A folder with a Llama's config.json alone, changed; None removes a key."""
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5} | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return folder
