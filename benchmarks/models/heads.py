"""Tiny targets that carry an MTP head, by the names of published checkpoints."""

import json
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.models.families import SHIFT, answered, counted, expected, tiny
from tlt_server.process import running_server

MIMO, GLM = "MiMo", "Glm4Moe"
Tensors = dict[str, Tensor]


def target(family: str, folder: Path, seed: int, sign: int = 1) -> Path:
    """Each of its tokens has a likeliest next one, which its head guesses. sign: -1 negates the last state, and what
    reads it: the head of a target of the other sign then guesses what is least likely."""
    tiny(family, folder, seed, shift=SHIFT)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= sign
    tensors["lm_head.weight"] *= sign
    save_file(tensors | _head(family, tensors, sign), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _head(family: str, tensors: Tensors, sign: int) -> Tensors:
    hidden = len(tensors["model.norm.weight"])
    identity, nothing, ones = torch.eye(hidden), torch.zeros(hidden, hidden), torch.ones(hidden)
    last, new = ("model.layers.3.", "model.mtp_layers.0.") if family == MIMO else ("model.layers.3.", "model.layers.4.")
    copied = {name.removeprefix(last): each for name, each in tensors.items() if name.startswith(last)}
    layer = {
        new + name: each * (0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
        for name, each in copied.items()
    }
    if family == MIMO:  # the state first
        return layer | {
            new + "input_proj.weight": torch.cat((nothing, identity), 1),
            new + "token_layernorm.weight": ones.clone(),
            new + "hidden_layernorm.weight": ones.clone(),
            new + "final_layernorm.weight": ones * sign,
        }
    return layer | {
        new + "eh_proj.weight": torch.cat((identity, nothing), 1),
        new + "enorm.weight": ones.clone(),
        new + "hnorm.weight": ones.clone(),
        new + "shared_head.norm.weight": ones * sign,
        new + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        new + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }


def follow(family: str, folder: Path) -> None:
    """A target drafts by its head, and by that of another target once that is published.

    Raises:
        AssertionError: greedy answers are not transformers', or the head guesses nothing.
    """
    first, second = (target(family, folder / str(seed), seed, sign) for seed, sign in ((0, 1), (1, -1)))
    arguments = ["--model-path", str(first), "--drafter", "mtp", "--arm", "3,1,4", "--max-total-tokens", "4096"]
    with running_server(arguments, folder / "server.log") as url:
        for served in (first, second):
            httpx.post(
                f"{url}/update_weights_from_disk", json={"model_path": str(served)}, timeout=60
            ).raise_for_status()
            before, answers, after = counted(url), answered(url), counted(url)
            assert answers == expected(served)
            assert after["accepted_tokens"] - before["accepted_tokens"] > 2 * (after["drafts"] - before["drafts"])
