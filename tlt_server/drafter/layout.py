"""Names and shapes of a drafter's tensors, by its config.

H is the hidden size, D a head's, V the draft vocabulary. The embedding is the target's and not stored, nor is the head,
unless an EAGLE-3 drafter has a vocabulary of its own.
"""

from collections.abc import Mapping

from tlt_server.config import DrafterKind
from tlt_server.drafter.config import DrafterConfig

Shape = tuple[int, ...]
LAYER = "layers.0."


def weights(config: DrafterConfig) -> Mapping[str, Shape]:
    """What is trained: matrices [out, in], norms and biases [out], in the target's dtype."""
    hidden, inner = config.hidden_size, config.intermediate_size
    is_eagle3 = config.kind is DrafterKind.EAGLE3
    mixed = len(config.aux_layers) if is_eagle3 else 2  # EAGLE mixes embedding and state
    shapes: dict[str, Shape] = {"fc.weight": (hidden, mixed * hidden)}
    if is_eagle3:
        shapes |= {f"{LAYER}input_layernorm.weight": (hidden,), f"{LAYER}hidden_norm.weight": (hidden,)}
    else:
        shapes["fc.bias"] = (hidden,)
    shapes |= _attention(config, 2 * hidden if is_eagle3 else hidden)
    shapes |= {
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
        f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}mlp.down_proj.weight": (hidden, inner),
    }
    if is_eagle3:
        shapes["norm.weight"] = (hidden,)
    if config.draft_vocab_size:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes


def _attention(config: DrafterConfig, reads: int) -> Mapping[str, Shape]:
    queries, keys = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes: dict[str, Shape] = {f"{LAYER}self_attn.{name}.weight": (size, reads) for name, size in rows.items()}
    if config.model_type == "qwen2":
        shapes |= {f"{LAYER}self_attn.{name}.bias": (size,) for name, size in rows.items()}
    return shapes | {f"{LAYER}self_attn.o_proj.weight": (config.hidden_size, queries)}
