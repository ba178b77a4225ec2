"""The config.json of a drafter, and what of the target's it follows from."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tlt_server.config import DrafterKind
from tlt_server.drafter.capability import require_capable, require_drafted
from tlt_server.errors import ConfigError

Count = Annotated[int, msgspec.Meta(gt=0)]


EAGLE = ("LlamaForCausalLMEagle", "llama")
"""SGLang's class, and its model type, that drafts for every family: its one layer is dense, whatever the target's are,
and has no norms of query and key."""
OWN_EAGLE: Mapping[str, tuple[str, str]] = {"Qwen2ForCausalLM": ("Qwen2ForCausalLMEagle", "qwen2")}
"""Targets that have one of their own."""
EAGLE3 = "LlamaForCausalLMEagle3"  # for every family
EAGLE3_LAYERS = 3


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What target and drafter have in common, by the names in config.json; other keys are ignored."""

    architectures: tuple[str, ...]
    model_type: str
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Count
    rms_norm_eps: float
    # transformers 4 writes the first two, 5 the third
    rope_theta: float | UnsetType = UNSET
    rope_scaling: dict[str, Any] | UnsetType | None = UNSET
    rope_parameters: dict[str, Any] | UnsetType = UNSET
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"


class EagleConfig(msgspec.Struct, frozen=True):
    """EAGLE-3's own part: the target's layers whose outputs the drafter reads, counted from 0."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...]


class DrafterConfig(ModelConfig, frozen=True, kw_only=True):
    """A drafter's config.json. draft_vocab_size: of EAGLE-3 alone: tokens that its own head knows; None: it has the
    target's head."""

    tie_word_embeddings: bool = False
    draft_vocab_size: Count | UnsetType | None = UNSET
    eagle_config: EagleConfig | UnsetType = UNSET

    @property
    def kind(self) -> DrafterKind:
        return DrafterKind.EAGLE3 if self.architectures[0] == EAGLE3 else DrafterKind.EAGLE

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def target_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """What a drafter needs to know of a target's config.json; `where` names it in the error. Raises ConfigError: a
    target that no drafter can be made for, or a key that is missing or ill-typed."""
    require_drafted(raw, DrafterKind.EAGLE, where)
    renamed = {"dtype": raw["torch_dtype"]} if raw.get("torch_dtype") and not raw.get("dtype") else {}
    try:
        return msgspec.convert({**raw, **renamed}, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def drafter_config(target: ModelConfig, kind: DrafterKind, draft_vocab: int | None = None) -> DrafterConfig:
    """The config of a drafter with one layer of the target's sizes. draft_vocab: tokens that it can propose; None: all.
    Raises ConfigError: a vocabulary that cannot be, or too shallow a target."""
    if draft_vocab is not None and kind is DrafterKind.EAGLE:
        raise ConfigError(f"draft vocabulary {draft_vocab}: EAGLE has the target's head. Drop it, or make an eagle3")
    if draft_vocab is not None and not 0 < draft_vocab < target.vocab_size:
        raise ConfigError(f"draft vocabulary {draft_vocab}: must lie between 1 and {target.vocab_size - 1}")
    common = {name: getattr(target, name) for name in ModelConfig.__struct_fields__}
    common |= {
        "num_hidden_layers": 1,
        "num_key_value_heads": target.num_key_value_heads or target.num_attention_heads,
        "head_dim": target.head_dim or target.hidden_size // target.num_attention_heads,
    }
    if kind is DrafterKind.EAGLE:
        architecture, model_type = OWN_EAGLE.get(target.architectures[0], EAGLE)
        return DrafterConfig(**common | {"architectures": (architecture,), "model_type": model_type})
    require_capable(target.architectures[0], kind, "the target")
    return DrafterConfig(
        **common | {"architectures": (EAGLE3,), "model_type": "llama"},
        draft_vocab_size=draft_vocab,
        eagle_config=EagleConfig(eagle3_layers(target.num_hidden_layers)),
    )


def eagle3_layers(layers: int) -> tuple[int, ...]:
    """The target's layers, of `layers`, that an EAGLE-3 drafter reads: an early, a middle and a late one.

    SGLang's choice, and so that of published drafters; a target too shallow for it gives the last three but one.

    Raises ConfigError: fewer than four layers. The last one's output is not to be had.
    """
    if layers <= EAGLE3_LAYERS:
        raise ConfigError(f"EAGLE-3 reads {EAGLE3_LAYERS} layers before the last; the target has {layers} in all")
    early, middle, late = 1, layers // 2 - 1, layers - 4
    return (early, middle, late) if early < middle < late else (layers - 4, layers - 3, layers - 2)
