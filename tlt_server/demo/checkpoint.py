"""Checkpoint folders of the demo's models, as transformers and SGLang load them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tlt_server.demo.tokens import END_ID, PAD_ID
from tlt_server.demo.training.drafter import Drafter, Eagle3Drafter, EagleDrafter
from tlt_server.demo.training.model import Shape, Target


def save_target(target: Target, folder: Path) -> None:
    """Write config, generation config and bfloat16 weights; the tokenizer is saved apart."""
    _write(folder, "config.json", _config(target.shape, "LlamaForCausalLM"))
    ends = {"bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    _write(folder, "generation_config.json", ends | {"do_sample": True, "temperature": 1.0, "top_p": 1.0})
    _save_weights(target, folder)


def save_drafter(drafter: Drafter, shape: Shape, folder: Path) -> None:
    """Write config and bfloat16 weights of a drafter for a target of `shape`."""
    config = _config(shape, drafter.architecture) | {"num_hidden_layers": 1}
    if isinstance(drafter, Eagle3Drafter):
        # without a draft vocabulary of its own SGLang shares the target's head
        layers = {"eagle_aux_hidden_state_layer_ids": list(drafter.aux_layers)}
        config |= {"draft_vocab_size": None, "eagle_config": layers}
    _write(folder, "config.json", config)
    _save_weights(drafter, folder)


def load_target(folder: Path) -> Target:
    """Read what `save_target` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    target = Target(_shape(config))
    target.load_state_dict(load_file(folder / "model.safetensors"))
    target.float().eval()
    return target


def load_drafter(folder: Path) -> Drafter:
    """Read what `save_drafter` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    kinds = {kind.architecture: kind for kind in (EagleDrafter, Eagle3Drafter)}
    drafter = kinds[config["architectures"][0]](_shape(config))
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    drafter.float().eval()
    return drafter


def _config(shape: Shape, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
    }


def _shape(config: dict[str, Any]) -> Shape:
    return Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        mlp=config["intermediate_size"],
        context=config["max_position_embeddings"],
        eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
    )


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _save_weights(module: nn.Module, folder: Path) -> None:
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in module.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
