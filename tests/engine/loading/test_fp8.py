"""Targets in fp8: what lies as it was published can be updated and checked, and anything else is refused at start."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.models.blocks import QUANTIZED, in_blocks
from tlt_server.engine.loading.schema import holds_as_published, not_finite, require_as_published
from tlt_server.errors import UnsupportedError

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def config(kind: str | None, said: dict[str, Any] | None, family: str = "Qwen3") -> SimpleNamespace:
    """What of upstream's `ModelConfig` counts."""
    loaded = SimpleNamespace(quantization_config=said, architectures=[f"{family}ForCausalLM"])
    return SimpleNamespace(quantization=kind, model_path="a target", hf_config=loaded)


def target(family: str, folder: Path) -> str:
    """A random one in fp8, of transformers' `{family}ForCausalLM`."""
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES))
    made.config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    told = {"architectures": [f"{family}ForCausalLM"], "quantization_config": QUANTIZED, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written | told))
    weights = in_blocks((name, each.to(torch.bfloat16)) for name, each in made.state_dict().items())
    save_file({name: each.contiguous() for name, each in weights}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.server
def test_an_update_is_held_against_blocks_and_scales(tmp_path: Path) -> None:
    """Of the classes that load them. SGLang's Llama still drops the scales: once it does not, it can be served."""
    folders = [target(family, tmp_path / family) for family in ("Qwen2", "Qwen3", "Llama")]
    command = [sys.executable, "-m", "tests.engine.loading.fp8", *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "said", "own_head", "served"),
    [
        (None, None, True, True),
        ("fp8", QUANTIZED, False, True),
        ("fp8", QUANTIZED, True, False),
        ("fp8", PER_TENSOR, False, False),
        ("fp8", None, False, False),  # quantized at start
        ("awq", {"quant_method": "awq"}, False, False),
    ],
)
def test_what_is_quantized_otherwise_is_refused(
    kind: str | None, said: dict[str, Any] | None, own_head: bool, served: bool
) -> None:
    made = config(kind, said)
    assert holds_as_published(made) == (kind is None or said is QUANTIZED)
    if served:
        require_as_published(made, own_head)
    for refused in ([] if served else [made]) + ([config(kind, said, "Llama")] if kind else []):
        with pytest.raises(UnsupportedError, match=rf"target a target is quantized \({kind}\).*Add --no-speculation"):
            require_as_published(refused, own_head)


def test_nan_in_fp8_is_found() -> None:
    fine = torch.tensor([448.0, -448.0, 0.0, 2**-9]).to(torch.float8_e4m3fn)
    bad = torch.tensor([1.0, float("nan")])
    named = [("fine", fine), ("bad", bad.to(torch.float8_e4m3fn)), ("minus", (-bad).to(torch.float8_e4m3fn))]
    assert not_finite(named) == ["bad", "minus"]
