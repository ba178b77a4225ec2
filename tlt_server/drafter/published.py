"""Drafters as others publish them, read as SGLang 0.5.17 and our trainer name them.

| published by                   | what differs                                                             |
|--------------------------------|--------------------------------------------------------------------------|
| EAGLE's authors                | the target's architecture in config.json, `midlayer.*`, `.bin`           |
| SpecForge, SpecBundle          | `midlayer.*`; some count the target's layers                             |
| AngelSlim                      | `midlayer.*`, a copy of the target's embedding                           |
| ModelOpt                       | no `d2t` where the head knows all tokens                                 |
| vLLM, transformers             | other names of the class                                                 |
| speculators                    | the layer's config one level down; the target's layers counted by input  |

Which kind a drafter is, its tensors say, not its name. What has no place is
refused by its name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from tlt_server.config import DrafterKind
from tlt_server.drafter.config import EAGLE3, EAGLE3_LAYERS, Count
from tlt_server.drafter.weightfiles import Load, Shapes, stored
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config

OTHERS = ("Eagle3DeepseekV2ForCausalLM", "MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle")
"""Classes of SGLang's whose drafters are taken as they are: served, not trained."""
MOST_LAYERS = 64
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
OPTIONS = ("norm_before_fc", "fc_norm", "norm_output")
"""Of EAGLE-3: what some have in `eagle_config`, others at the top."""
_PROJECTIONS = tuple(f"self_attn.{x}_proj" for x in "qkvo")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_COMMON = {f"{name}.weight" for name in (*_PROJECTIONS, *_MLP, "post_attention_layernorm")}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_DROPPED = re.compile(r"embed_tokens\.weight|t2d|verifier_.*|.*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Published:
    """A drafter by SGLang's names.

    config: what its config.json should say. names: of each tensor, as stored.
    made: tensors that it lacks and whose values follow. changed: in words, what differs from how it lies there.
    """

    folder: Path
    config: Mapping[str, Any]
    names: Mapping[str, str]
    made: Mapping[str, Tensor]
    changed: tuple[str, ...]
    _load: Load = field(repr=False)

    @property
    def kind(self) -> DrafterKind:
        return DrafterKind.EAGLE3 if "eagle3" in self.config["architectures"][0].lower() else DrafterKind.EAGLE

    def described(self) -> list[str]:
        """For people, a line a fact."""
        config, of = self.config, {DrafterKind.EAGLE: "EAGLE", DrafterKind.EAGLE3: "EAGLE-3"}[self.kind]
        width, tokens, depth = (config.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
        layers = f"{depth} layer{'s' * (depth != 1)}"
        known = config.get("draft_vocab_size")
        head = "the target's head" if known is None else f"a head of its own over {known} of its tokens"
        lines = [
            f"kind       {of}, {layers} of width {width}; {config['architectures'][0]}",
            f"target     of width {config.get('target_hidden_size') or width}, {tokens} tokens",
            f"vocabulary {head}",
        ]
        if aux := (config.get("eagle_config") or {}).get(AUX_LAYERS):
            lines.append(f"reads      what the target's layers {', '.join(map(str, aux))} put out, counted from 0")
        return lines + [f"read       {each}" for each in self.changed]

    def tensors(self) -> dict[str, Tensor]:
        """All of it, in memory. Raises ConfigError: a file is damaged."""
        try:
            held = self._load()
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"drafter {self.folder}: damaged or incomplete ({error}). Download it again") from error
        return {name: held[there] for name, there in self.names.items()} | dict(self.made)


def read(folder: Path) -> Published:
    """The drafter in a folder; of its tensors the names and shapes alone, where they lie in safetensors files.

    Raises ConfigError: not a drafter that SGLang could run as its authors mean it; the message says why.
    """
    raw, (shapes, tensors) = read_config(folder), stored(folder)
    if raw.get("architectures") in [[name] for name in OTHERS]:
        return Published(folder, raw, {name: name for name in shapes}, {}, (), tensors)
    try:
        return _normal(folder, raw, shapes, tensors)
    except _Refused as why:
        raise ConfigError(f"drafter {folder}: {why}") from why


class _Refused(Exception):
    """Why a drafter is none that could be served."""


class _EagleConfig(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class _Keys(msgspec.Struct):
    """What is read of a config.json here, of the types that it must have."""

    architectures: list[str] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: _EagleConfig | None = None
    draft_vocab_size: Count | None = None
    hidden_size: Count | None = None
    target_hidden_size: Count | None = None
    vocab_size: Count | None = None
    num_hidden_layers: Count | None = None
    transformer_layer_config: dict[str, Any] | None = None
    speculators_model_type: str = "eagle3"


def _check_types(config: Mapping[str, Any]) -> None:
    try:
        msgspec.convert(config, _Keys)
    except msgspec.ValidationError as error:
        raise _Refused(f"config.json: {error}") from error


def _normal(folder: Path, raw: Mapping[str, Any], held: Shapes, load: Load) -> Published:
    _check_types(raw)
    if "dflash_config" in raw or "DFlash" in str(raw.get("architectures")):
        raise _Refused(
            "DFlash drafts a block at once, which this server cannot verify. Use an EAGLE or EAGLE-3 drafter"
        )
    renamed = {name: _canonical(name) for name in held}
    shapes = {new: held[old] for old, new in renamed.items()}
    if (fc := shapes.get("fc.weight")) is None or len(fc) != 2:
        raise _Refused("it has no fc.weight, which every EAGLE and EAGLE-3 drafter has")
    config, changed = _flat(raw)
    _check_types(config)
    if config.get("vocab_size") is None:
        raise _Refused("its config.json has no vocab_size")
    eagle3 = "layers.0.hidden_norm.weight" in shapes
    if not eagle3 and fc[1] != 2 * fc[0]:
        raise _Refused(f"neither EAGLE's nor EAGLE-3's: fc.weight is {list(fc)}, and there is no hidden_norm")
    if config.get("hidden_size") not in (None, fc[0]):
        raise _Refused(f"hidden_size is {config['hidden_size']} in its config.json, and {fc[0]} in its tensors")
    made = (_eagle3 if eagle3 else _eagle)(config, shapes, changed)
    layers = 1 + max((int(found[1]) for name in shapes if (found := _LAYER.fullmatch(name))), default=0)
    if layers > MOST_LAYERS:
        raise _Refused(f"it has a layer {layers - 1}; {MOST_LAYERS} layers are the most")
    _set(config, changed, num_hidden_layers=layers)
    kept = {new: old for old, new in renamed.items() if not _left_out(new, config, eagle3=eagle3)}
    _check_names(kept, layers, config, eagle3=eagle3)
    if moved := [old for new, old in kept.items() if new != old]:
        changed.append(f"{len(moved)} tensors renamed, {moved[0]} to {_canonical(moved[0])} among them")
    if made:
        changed.append(f"{', '.join(made)} added")
    if len(list(folder.glob("*.safetensors"))) != 1:
        changed.append("one safetensors file")
    return Published(folder, config, kept, made, tuple(changed), load)


def _canonical(name: str) -> str:
    name = re.sub(r"^model\.", "", name)
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _flat(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """config.json with what speculators puts one level down, and its layers as SGLang counts them: by their output."""
    if (layer := raw.get("transformer_layer_config")) is None:
        return dict(raw), []
    if (algorithm := raw.get("speculators_model_type", "eagle3")) != "eagle3":
        raise _Refused(f"speculators' {algorithm}: of its kinds eagle3 alone runs here")
    if raw.get("norm_before_residual"):
        raise _Refused("norm_before_residual true: SGLang 0.5.17 norms after the residual, so it would guess badly")
    config = dict(layer)
    config["dtype"] = raw.get("dtype") or raw.get("torch_dtype") or layer.get("torch_dtype") or "float32"
    config |= {name: raw[name] for name in ("target_hidden_size", "draft_vocab_size", *OPTIONS) if raw.get(name)}
    if ids := raw.get(AUX_LAYERS):
        config["eagle_config"] = {AUX_LAYERS: [each - 1 for each in ids]}
    return config, ["speculators' config made flat"]


def _set(config: dict[str, Any], changed: list[str], **values: Any) -> None:
    """What is said otherwise, or not at all, is said so."""
    for key, value in values.items():
        if key not in config or config[key] != value:
            changed.append(f"{key} {json.dumps(value)}, not {json.dumps(config.get(key))}")
            config[key] = value


def _eagle(config: dict[str, Any], shapes: Shapes, changed: list[str]) -> dict[str, Tensor]:
    """The class and sizes of an EAGLE drafter. Returns what it lacks."""
    biased = {x for x in "qkvo" if f"layers.0.self_attn.{x}_proj.bias" in shapes}
    if biased not in (set(), set("qkv"), set("qkvo")):
        raise _Refused(f"a bias at {', '.join(sorted(biased))} alone: no class of SGLang's has that")
    qwen2 = biased == set("qkv")
    _set(config, changed, architectures=["Qwen2ForCausalLMEagle" if qwen2 else "LlamaForCausalLMEagle"])
    _set(config, changed, model_type="qwen2" if qwen2 else "llama", hidden_size=shapes["fc.weight"][0])
    if not qwen2 and bool(config.get("attention_bias")) != bool(biased):
        _set(config, changed, attention_bias=bool(biased))
    return {} if "fc.bias" in shapes else {"fc.bias": torch.zeros(shapes["fc.weight"][0])}


def _eagle3(config: dict[str, Any], shapes: Shapes, changed: list[str]) -> dict[str, Tensor]:
    """The class, sizes, layers and vocabulary of an EAGLE-3 drafter. Returns what it lacks."""
    width, reads = shapes["fc.weight"]
    target_width = config.get("target_hidden_size") or width
    ids = (config.get("eagle_config") or {}).get(AUX_LAYERS)
    if ids is None and config.get(AUX_LAYERS):
        ids = [each - 1 for each in config[AUX_LAYERS]]  # vLLM counts a layer by its input
        _set(config, changed, eagle_config={**(config.get("eagle_config") or {}), AUX_LAYERS: ids})
    wanted = len(ids) if ids else EAGLE3_LAYERS
    if reads != wanted * target_width:
        raise _Refused(
            f"fc.weight reads {reads} numbers, which is not {wanted} layers of {target_width}; name its layers"
        )
    _set(config, changed, architectures=[EAGLE3], hidden_size=width)
    if config.get("model_type") != "llama4_text":
        _set(config, changed, model_type="llama")
    of_target = "draft_vocab_size" in config and config["draft_vocab_size"] is None  # whatever is stored beside it
    rows = None if of_target or "lm_head.weight" not in shapes else _rows(shapes["lm_head.weight"])
    if rows is None or "draft_vocab_size" not in config or config["draft_vocab_size"] != rows:
        _set(config, changed, draft_vocab_size=rows)
    if config.get("tie_word_embeddings"):
        _set(config, changed, tie_word_embeddings=False)
    return _vocabulary(rows, config["vocab_size"], shapes)


def _rows(head: tuple[int, ...]) -> int:
    if len(head) != 2:
        raise _Refused(f"lm_head.weight is {list(head)}, not a matrix")
    return head[0]


def _vocabulary(rows: int | None, vocabulary: int, shapes: Shapes) -> dict[str, Tensor]:
    """d2t of a head of its own: each draft token's id in the target, less its own."""
    if rows is None or "d2t" in shapes:
        if rows is not None and shapes["d2t"] != (rows,):
            raise _Refused(f"d2t is {list(shapes['d2t'])}, where the head has {rows} rows")
        return {}
    if rows != vocabulary:
        raise _Refused(f"its head knows {rows} of {vocabulary} tokens, and without d2t nobody knows which")
    return {"d2t": torch.zeros(rows, dtype=torch.int64)}


def _left_out(name: str, config: Mapping[str, Any], *, eagle3: bool) -> bool:
    """What SGLang takes from the target, or makes itself: the embedding, unless it is of another width."""
    if name in ("lm_head.weight", "d2t"):
        return not eagle3 or config.get("draft_vocab_size") is None
    if name == "embed_tokens.weight" and config.get("target_hidden_size") not in (None, config["hidden_size"]):
        return False
    return _DROPPED.fullmatch(name) is not None


def _check_names(names: Mapping[str, str], layers: int, config: Mapping[str, Any], *, eagle3: bool) -> None:
    """All that SGLang's class has is there, and nothing else: what is missing would stay random, silently."""
    required = set(_required(layers, config, eagle3=eagle3))
    allowed = required | {"embed_tokens.weight", "d2t", "lm_head.weight", "fc.bias"}
    allowed |= {f"layers.{n}.{projection}.bias" for n in range(layers) for projection in _PROJECTIONS}
    if unknown := sorted(set(names) - allowed):
        kind = "EAGLE-3" if eagle3 else "EAGLE"
        raise _Refused(f"{names[unknown[0]]}: SGLang 0.5.17's {kind} has no such weight, so it would guess without it")
    if missing := sorted(required - set(names)):
        raise _Refused(f"{missing[0]} is missing{f', and {len(missing) - 1} more' * (len(missing) > 1)}")


def _required(layers: int, config: Mapping[str, Any], *, eagle3: bool) -> Iterator[str]:
    yield "fc.weight"
    for layer in range(layers):
        yield from (f"layers.{layer}.{name}" for name in _COMMON)
        if eagle3:
            yield from (f"layers.{layer}.{norm}.weight" for norm in ("hidden_norm", "input_layernorm"))
        elif layer:
            yield f"layers.{layer}.input_layernorm.weight"
    if not eagle3:
        return
    yield "norm.weight"
    if config.get("draft_vocab_size") is not None:
        yield "lm_head.weight"
    if config.get("fc_norm") or config.get("use_aux_norm"):
        aux = (config.get("eagle_config") or {}).get(AUX_LAYERS)
        yield from (f"fc_norm.{n}.weight" for n in range(len(aux) if aux else EAGLE3_LAYERS))
    if {**config, **(config.get("eagle_config") or {})}.get("norm_before_fc"):
        yield "input_norm.weight"
