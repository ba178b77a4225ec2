"""Checkpoints without weights, of the sizes of published models: SGLang makes the weights up (`--load-format dummy`).

What a step costs does not depend on their values; a mixture's router sends tokens to experts at random, and evenly. The
drafter's folder has weights, of one that has learnt nothing: so it can be exchanged while it serves.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.reload.weights import Tensors
from benchmarks.models.shapes import SHAPES, Shape
from tlt_server.drafter.folder import create
from tlt_server.preflight import read_config

FLAGS = ("--load-format", "dummy", "--speculative-draft-load-format", "auto")
EXPERTS_SENT = 8
TINY = Shape(bias=True, vocab=512, hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=256)
QWEN3_30B_A3B = Shape(
    bias=False, vocab=151_936, hidden=2_048, layers=48, heads=32, kv_heads=4, head_dim=128, mlp=6_144, context=40_960
)
MIXED = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MIXED |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
FEW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
Config = dict[str, Any]


def dense(name: str, tiny: bool) -> Config:
    """Qwen2.5's, of a size in SHAPES. tiny: of the same family, for a CPU."""
    config = _config("Qwen2", TINY if tiny else SHAPES[name])
    return config | {"tie_word_embeddings": name == "qwen2.5-1.5b"}


def mixture(tiny: bool) -> Config:
    """Qwen3-30B-A3B's, whole."""
    return _config("Qwen3Moe", TINY if tiny else QWEN3_30B_A3B) | MIXED | (FEW if tiny else {})


def _config(family: str, shape: Shape) -> Config:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": {"Qwen2": "qwen2", "Qwen3Moe": "qwen3_moe"}[family],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write(config: Config, folder: Path, tokenizer: Path) -> tuple[Path, Path]:
    """A target's folder and its EAGLE drafter's. tokenizer: a model's folder with it, and with the tokens that end."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tokenizer / file, target / file)
    ends = {name: read_config(tokenizer)[name] for name in ("bos_token_id", "eos_token_id")}
    (target / "config.json").write_text(json.dumps(config | ends, indent=2))
    create(str(target), drafter)
    return target, drafter


def part_of(config: Mapping[str, Any]) -> Tensors:
    """What a publication of a part may carry: attention of the first layer, its router and some of its experts."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{of}_heads"] * head_dim for of in ("attention", "key_value"))
    sizes = {f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", queries), ("k", keys), ("v", keys))}
    sizes["self_attn.o_proj"] = (hidden, queries)
    if "num_experts" in config:
        between = config["moe_intermediate_size"]
        sizes["mlp.gate"] = (config["num_experts"], hidden)
        for expert in (f"mlp.experts.{number}" for number in range(EXPERTS_SENT)):
            sizes |= {f"{expert}.{name}_proj": (between, hidden) for name in ("gate", "up")}
            sizes[f"{expert}.down_proj"] = (hidden, between)
    draw = torch.Generator().manual_seed(0)
    made = {name: torch.empty(size).uniform_(-1e-3, 1e-3, generator=draw) for name, size in sizes.items()}
    return {f"model.layers.0.{name}.weight": each.to(torch.bfloat16) for name, each in made.items()}
