"""The demo's target as a checkpoint folder that transformers and SGLang load; drafters: `trainer.publish.folder`."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tlt_server.demo.tokens import END_ID, PAD_ID
from tlt_server.demo.training.model import Shape, Target

ENDS = {"bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}


def save_target(target: Target, folder: Path) -> None:
    """Write config, generation config and bfloat16 weights; the tokenizer is saved apart."""
    folder.mkdir(parents=True, exist_ok=True)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}
    for name, content in (("config", target.shape.config() | ENDS), ("generation_config", ENDS | sampling)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    weights = {name: each.to("cpu", torch.bfloat16).contiguous() for name, each in target.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_target(folder: Path) -> Target:
    """Read what `save_target` wrote, in float32."""
    target = Target(Shape.of(json.loads((folder / "config.json").read_text())))
    target.load_state_dict(load_file(folder / "model.safetensors"))
    target.float().eval()
    return target
