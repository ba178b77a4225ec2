"""The embedded drafters as others would publish them: those that are right decode as they do, others are refused.

The forms are those seen in the repositories that are named, in the autumn of 2026; the numbers are the embedded ones'.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_server.demo import default_paths, eagle3_path

TARGET, EAGLE = default_paths()
EAGLE3 = eagle3_path()
TARGET_WEIGHTS = load_file(TARGET / "model.safetensors")
EMBEDDING, HEAD = TARGET_WEIGHTS["model.embed_tokens.weight"], TARGET_WEIGHTS["lm_head.weight"]
KNOWN = 255
"""Tokens of a reduced vocabulary; the embedded tokenizer has 295, and its texts use the first of them."""

Config, Tensors = dict[str, Any], dict[str, Tensor]


def _eagle() -> tuple[Config, Tensors]:
    return json.loads((EAGLE / "config.json").read_text()), load_file(EAGLE / "model.safetensors")


def _eagle3(rows: int | None = None) -> tuple[Config, Tensors]:
    """With the target's head; with so many rows of it as its own."""
    config, tensors = json.loads((EAGLE3 / "config.json").read_text()), load_file(EAGLE3 / "model.safetensors")
    if rows is not None:
        config["draft_vocab_size"] = rows
        tensors["lm_head.weight"] = HEAD[:rows].clone()
    return config, tensors


def _reduced() -> tuple[Config, Tensors]:
    config, tensors = _eagle3(KNOWN)
    known = torch.arange(len(HEAD)) < KNOWN
    return config, tensors | {"d2t": torch.zeros(KNOWN, dtype=torch.int64), "t2d": known}


def _midlayer(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}


def _embedded(tensors: Mapping[str, Tensor]) -> Tensors:
    return {**tensors, "embed_tokens.weight": EMBEDDING.clone()}


def _speculators(architecture: str, **more: object) -> tuple[Config, Tensors]:
    config, tensors = _reduced()
    layer = {name: value for name, value in config.items() if name not in ("eagle_config", "draft_vocab_size", "dtype")}
    aux = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    found = {
        "architectures": [architecture],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
        "draft_vocab_size": KNOWN,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [each + 1 for each in aux],
        "torch_dtype": "bfloat16",
    }
    return found | more, _embedded(tensors)


def _write(
    folder: Path, config: Config, tensors: Mapping[str, Tensor], *, parts: int = 1, pickled: bool = False
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: each.contiguous().clone() for name, each in tensors.items()}
    if pickled:
        torch.save(stored, folder / "pytorch_model.bin")
        return
    names = sorted(stored)
    for part in range(parts):
        file = "model.safetensors" if parts == 1 else f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({name: stored[name] for name in names[part::parts]}, folder / file, metadata={"format": "pt"})


def _yuhuili_eagle(folder: Path) -> None:
    config, tensors = _eagle()
    _write(folder, config | {"architectures": ["LlamaForCausalLM"]}, _embedded(tensors), pickled=True)


def _yuhuili_qwen2(folder: Path) -> None:
    config, tensors = _eagle()
    biases = {f"layers.0.self_attn.{x}_proj": len(tensors[f"layers.0.self_attn.{x}_proj.weight"]) for x in "qkv"}
    zeros = {f"{name}.bias": torch.zeros(rows, dtype=torch.bfloat16) for name, rows in biases.items()}
    _write(folder, config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, tensors | zeros)


def _yuhuili_eagle3(folder: Path) -> None:
    config, tensors = _reduced()
    _write(folder, config | {"architectures": ["LlamaForCausalLM"]}, _midlayer(tensors), pickled=True)


def _lmsys_eagle(folder: Path) -> None:
    config, tensors = _eagle()
    _write(folder, config, _embedded(tensors), pickled=True)


def _lmsys_eagle3(folder: Path) -> None:
    config, tensors = _reduced()
    _write(folder, config, _midlayer(tensors), pickled=True)


def _specforge(folder: Path, **more: object) -> None:
    config, tensors = _reduced()
    _write(folder, config | more, _midlayer(tensors))


def _angelslim(folder: Path) -> None:
    config, tensors = _reduced()
    more = {"mlp_bias": False, "max_window_layers": 4, "sliding_window": None, "rope_scaling": None}
    _write(folder, config | more, _embedded(_midlayer(tensors)))


def _modelopt(folder: Path, rows: int | None = None, **more: object) -> None:
    config, tensors = _eagle3(rows)
    config["eagle_config"] |= {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True}
    _write(folder, config | more, tensors)


def _two_layers(folder: Path) -> None:
    """The second adds nothing."""
    config, tensors = _eagle3()
    second = {
        name.replace("layers.0.", "layers.1."): each.clone() for name, each in tensors.items() if "layers.0." in name
    }
    hidden = config["hidden_size"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        second[f"layers.1.{name}.weight"].zero_()
    for x in "qkv":
        second[f"layers.1.self_attn.{x}_proj.weight"] = second[f"layers.1.self_attn.{x}_proj.weight"][:, :hidden]
    _write(folder, config | {"num_hidden_layers": 2}, tensors | second)


def _fc_norm(folder: Path) -> None:
    config, tensors = _eagle3()
    norms = {f"fc_norm.{n}.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16) for n in range(3)}
    _write(folder, config | {"fc_norm": True}, tensors | norms)


def _narrow(folder: Path) -> None:
    """Half as wide, with an embedding of its own; it has learnt nothing."""
    config, tensors = _eagle3(len(HEAD))
    hidden = config["hidden_size"]
    half = hidden // 2
    cut: Tensors = {}
    for name, each in tensors.items():
        halves = [size // 2 if size % half == 0 else size for size in each.shape]
        cut[name] = each[tuple(slice(size) for size in halves)]
    cut["fc.weight"] = tensors["fc.weight"][:half]
    cut["embed_tokens.weight"] = EMBEDDING[:, :half]
    sizes = {"hidden_size": half, "intermediate_size": config["intermediate_size"] // 2, "target_hidden_size": hidden}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    _write(folder, config | sizes | heads, cut)


def _named(folder: Path, architecture: str, **more: object) -> None:
    config, tensors = _reduced()
    _write(folder, config | {"architectures": [architecture]} | more, tensors)


def _sharded(folder: Path) -> None:
    config, tensors = _eagle3()
    _write(folder, config, tensors, parts=2)


def _dflash(folder: Path) -> None:
    config, tensors = _eagle3()
    more = {"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": {"mask_token_id": 2}}
    _write(folder, config | more, {"fc.weight": tensors["fc.weight"]})


YARN = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048}
"""Of factor 1: the angles are the embedded drafter's."""

FORMATS: Mapping[str, Callable[[Path], None]] = {
    "yuhuili EAGLE, .bin": _yuhuili_eagle,
    "yuhuili EAGLE of Qwen2": _yuhuili_qwen2,
    "yuhuili EAGLE-3, .bin": _yuhuili_eagle3,
    "lmsys EAGLE, .bin": _lmsys_eagle,
    "lmsys EAGLE-3, .bin": _lmsys_eagle3,
    "SpecForge": _specforge,
    "SpecForge, the target's layers counted": lambda folder: _specforge(folder, num_hidden_layers=40),
    "AngelSlim": _angelslim,
    "ModelOpt, the target's head": _modelopt,
    "ModelOpt, the target's head, its vocabulary named": lambda folder: _modelopt(folder, draft_vocab_size=len(HEAD)),
    "ModelOpt, a head of its own": lambda folder: _modelopt(folder, len(HEAD)),
    "ModelOpt, YaRN": lambda folder: _modelopt(folder, rope_scaling=YARN),
    "speculators": lambda folder: _write(folder, *_speculators("Eagle3Speculator")),
    "speculators, Eagle3DraftModel": lambda folder: _write(folder, *_speculators("Eagle3DraftModel")),
    "vLLM's name": lambda folder: _named(folder, "Eagle3LlamaForCausalLM"),
    "a name of Qwen3's": lambda folder: _named(folder, "Qwen3ForCausalLMEagle3", model_type="qwen3"),
    "EAGLE-3.1, fc_norm": _fc_norm,
    "EAGLE-3, two layers": _two_layers,
    "EAGLE-3, narrower": _narrow,
    "EAGLE-3, sharded": _sharded,
    "speculators, norm before the residual": lambda folder: _write(
        folder, *_speculators("Eagle3DraftModel", norm_before_residual=True)
    ),
    "DFlash": _dflash,
}
REFUSED = {
    "speculators, norm before the residual": "norm_before_residual true: SGLang 0.5.17",
    "DFlash": "DFlash drafts a block at once",
}
NOT_TRAINED = {
    "EAGLE-3.1, fc_norm": "fc_norm True: not supported",
    "EAGLE-3, two layers": "num_hidden_layers 2",
    "EAGLE-3, narrower": "narrower than its target",
}
UNTRAINED = ("EAGLE-3, narrower",)
"""Those whose numbers mean nothing: they cannot guess."""
