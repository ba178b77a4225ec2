"""Names and shapes of a drafter's tensors, by its config, and what they hold before training.

H is the hidden size, D a head's, V the draft vocabulary. The embedding is the target's and not stored, nor is the head,
unless an EAGLE-3 drafter has a vocabulary of its own.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tlt_server.config import DrafterKind
from tlt_server.drafter.config import DrafterConfig
from tlt_server.errors import ConfigError

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


SPREAD = 0.02
"""Standard deviation of a matrix's entries, as of a target's before its training."""


def initial_weights(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Ones for norms, zeros for biases, normal numbers for matrices; the same for the same seed.

    EAGLE's `fc` has the identity on the target's state added: the layer learns how the next state differs.
    """
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, config.dtype)

    def fresh(name: str, shape: Shape) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype)
        return torch.empty(shape).normal_(0, SPREAD, generator=generator).to(dtype)

    tensors = {name: fresh(name, shape) for name, shape in weights(config).items()}
    if config.kind is DrafterKind.EAGLE:
        tensors["fc.weight"][:, config.hidden_size :] += torch.eye(config.hidden_size)
    return tensors


def vocabulary_of(tokens: Tensor, target_vocab: int) -> dict[str, Tensor]:
    """EAGLE-3's maps between its vocabulary, `tokens` [V] int64 in ascending order, and the target's.

    d2t [V] int64: the target's token for each of the drafter's, less the drafter's own. t2d [target_vocab] bool:
    whether the drafter knows the target's token. SGLang reads the first; the second is for training.
    """
    known = torch.zeros(target_vocab, dtype=torch.bool)
    known[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The `size` tokens [size] int64 that `counts` [target's vocabulary] is largest for, ascending; of equals the
    lowest."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def read_counts(path: Path, vocab: int) -> Tensor:
    """How often each token occurs: [vocab] int64, from JSON {"token id": count}, else 0. ConfigError: not that."""
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=dict[int, int])
    except OSError as error:
        raise ConfigError(f"token counts {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f'token counts {path}: {error}. Write {{"token id": count}}') from error
    if outside := [token for token in counts if not 0 <= token < vocab]:
        raise ConfigError(f"token counts {path}: token {outside[0]} is not one of the target's, 0 to {vocab - 1}")
    return torch.tensor([counts.get(token, 0) for token in range(vocab)])
