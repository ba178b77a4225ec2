"""Tiny random checkpoints of other families than the demo's, which speaks Llama's dialect."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from tlt_server.demo import default_paths
from tlt_server.engine.cpu.torchvision import mend_torchvision

mend_torchvision()  # transformers imports it

SMALL: dict[str, Any] = {
    "vocab_size": 295,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MIXED = {"num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4} | MIXED,
    "Phimoe": {"num_local_experts": 4, "architectures": ["PhiMoEForCausalLM"]} | MIXED,
    "Olmo": {"num_key_value_heads": 4},
    "Olmoe": {"num_experts": 4, "num_key_value_heads": 4} | MIXED,
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh"},
}
"""What a family's configuration has beside, as its published checkpoints do."""


def tiny(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of random weights, of transformers' `{family}ForCausalLM`, with the demo's tokenizer."""
    config = getattr(transformers, f"{family}Config")(**SMALL | OWN.get(family, {}))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    if architectures := OWN.get(family, {}).get("architectures"):
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"architectures": architectures}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_paths()[0] / file, folder / file)
    return folder
