"""Drafters for engines that know nothing of us, in the form that each loads.

| form        | EAGLE                                     | EAGLE-3                                                    |
|-------------|-------------------------------------------|------------------------------------------------------------|
| sglang      | SGLang 0.5.17 loads it, by a test         | likewise; and vLLM 0.33, by its source                     |
| vllm        | by vLLM's source: Llama's class, no bias  | as for SGLang                                              |
|             | in `fc`                                   |                                                            |
| speculators | none: 0.9 has no EAGLE                    | the layer's config one level down, always a head of its    |
|             |                                           | own; vLLM finds the target by it                           |

vLLM and speculators count a layer that the drafter reads by its input, one higher than SGLang.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt_server import files
from tlt_server.config import DrafterForm
from tlt_server.drafter.card import Measured, card
from tlt_server.drafter.config import EAGLE3
from tlt_server.drafter.folder import write
from tlt_server.drafter.published import AUX_LAYERS, OPTIONS, Published
from tlt_server.drafter.target import read_tensor
from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.preflight import check_fit, model_folder, read_config, read_model_config

HEAD = "lm_head.weight"
SPECULATIVE_TOKENS = 3
"""What a speculators folder has vLLM draft unless told otherwise."""


@dataclass(frozen=True)
class Exported:
    """A drafter by SGLang's names, to be written: config.json; tensors by name; what is known of its weights."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    provenance: Mapping[str, str]

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @classmethod
    def of(cls, found: Published) -> "Exported":
        """What was read. Raises ConfigError: a file is damaged."""
        return cls(found.config, found.tensors(), told(found.folder))


def told(folder: Path) -> dict[str, str]:
    """What a drafter's only safetensors file says of itself beside its tensors; nothing where there is no such file."""
    paths = sorted(folder.glob("*.safetensors"))
    if len(paths) != 1:
        return {}
    try:
        with files.regular(paths[0]), safe_open(paths[0], framework="pt") as file:
            return dict(sorted((file.metadata() or {}).items()))  # which come in another order each time
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{paths[0]}: damaged or incomplete ({error}). Copy or download it again") from error


def export(
    drafter: Exported, form: DrafterForm, out: Path, target: str | None = None, measured: Measured | None = None
) -> None:
    """Writes a drafter and its model card to a new folder, whole or not at all.

    target: folder or hub name; by default what the drafter says of itself. The card names it; speculators' form, which
    must be given it, has its architecture, and its head where the drafter has none. measured: for the card.

    Raises ConfigError: `out` exists, the drafter is another target's, or the form has no place for it. Raises
    DiskFailed: no room.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists. Remove it, or name another folder")
    if target is not None:
        check_fit(target, read_model_config("target", target), "to export", drafter.config)
    config, tensors = _FORMS[form](drafter, target)
    about = card(drafter.config, drafter.provenance, form, target or drafter.provenance.get("target"), measured)
    try:
        text = json.dumps(config, indent=2).encode() + b"\n"
        write(text, tensors, {**drafter.provenance, "form": form}, out, about)
    except (OSError, SafetensorError) as error:
        raise DiskFailed(f"drafter {out} cannot be written ({error}): make room there") from error


_Written = tuple[dict[str, Any], dict[str, Tensor]]


def _sglang(drafter: Exported, _: str | None) -> _Written:
    config = dict(drafter.config)
    if layers := (config.get("eagle_config") or {}).get(AUX_LAYERS):
        config[AUX_LAYERS] = [layer + 1 for layer in layers]  # vLLM's; SGLang reads its own in eagle_config
    return config, dict(drafter.tensors)


def _vllm(drafter: Exported, target: str | None) -> _Written:
    config, tensors = _sglang(drafter, target)
    if drafter.architecture == EAGLE3:
        return _options_on_top(config), tensors
    if drafter.architecture not in ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"):
        raise ConfigError(f"a drafter of class {drafter.architecture} is exported for SGLang alone: --form sglang")
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bias.any():
        raise ConfigError(
            "fc.bias: vLLM's EAGLE has no such weight, and this drafter has learnt one. Use --form sglang, or train an "
            "eagle3"
        )
    if drafter.architecture == "Qwen2ForCausalLMEagle":
        config |= {"model_type": "llama", "attention_bias": False, "qkv_bias": True}  # which vLLM's Llama knows
    return config | {"architectures": ["LlamaForCausalLM"]}, tensors


def _options_on_top(config: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE-3 drafter's config, for engines whose attention has biases at all projections or none."""
    if config.get("attention_bias"):
        raise ConfigError("attention_bias: with it, others' EAGLE-3 has biases that SGLang's has not: --form sglang")
    within = {**config, **(config.get("eagle_config") or {})}
    found = {name: within[name] for name in OPTIONS if within.get(name)}
    return config | found | ({"fc_norm": True} if config.get("use_aux_norm") else {})


def _speculators(drafter: Exported, target: str | None) -> _Written:
    if drafter.architecture != EAGLE3:
        raise ConfigError(f"{drafter.architecture}: speculators' form is EAGLE-3's alone. Use --form sglang, or vllm")
    if target is None:
        raise ConfigError("speculators' form says which target a drafter is for: give --target")
    layer = _options_on_top(_sglang(drafter, target)[0])
    if layer.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise ConfigError("target_hidden_size: speculators' form has no place for a drafter narrower than its target")
    folder = model_folder("target", target)
    tensors, vocabulary = dict(drafter.tensors), layer["vocab_size"]
    if HEAD not in tensors:
        head = read_tensor(folder, HEAD, "model.embed_tokens.weight")  # the latter where they are tied
        tensors[HEAD] = head.to(tensors["fc.weight"].dtype)
    rows = len(tensors[HEAD])
    _map_vocabulary(tensors, rows, vocabulary)
    lifted = {name: layer.pop(name) for name in (AUX_LAYERS, *OPTIONS, "dtype", "torch_dtype") if name in layer}
    for name in ("eagle_config", "draft_vocab_size", "target_hidden_size", "use_aux_norm"):
        layer.pop(name, None)
    verifier = {"name_or_path": target, "architectures": list(read_config(folder).get("architectures") or [])}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "draft_vocab_size": rows,
        "norm_before_residual": False,  # vLLM's default is True
    }
    return config | lifted, tensors


def _map_vocabulary(tensors: dict[str, Tensor], rows: int, vocabulary: int) -> None:
    """d2t and t2d for a head over a part of the vocabulary, and neither for one over all."""
    offsets = tensors.pop("d2t", torch.zeros(rows, dtype=torch.int64))
    tensors.pop("t2d", None)
    if rows != vocabulary:
        tokens = offsets + torch.arange(rows)
        known = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, tokens, True)
        tensors |= {"d2t": offsets, "t2d": known}
    elif offsets.any():
        raise ConfigError("d2t: speculators' form has none for a head over all tokens, and this one reorders them")


_FORMS: Mapping[DrafterForm, Callable[[Exported, str | None], _Written]] = {
    DrafterForm.SGLANG: _sglang,
    DrafterForm.VLLM: _vllm,
    DrafterForm.SPECULATORS: _speculators,
}
