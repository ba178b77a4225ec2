"""A target of any vocabulary whose law can be enumerated, and an EAGLE drafter that fits it: both made by hand.

A few hundred tokens are common. After a common token one other is likely, five more are less so, and every token of
the vocabulary is possible: so the law of a few tokens is a few hundred continuations and a long tail. The head reads
this off the last token's embedding; two layers of random weights add what depends on the context, enough that attention
to a wrong ancestor shows. The drafter passes the embedding through: it is right as often as the likely token comes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 1024, 2, 8, 4, 64
CONTEXT = 512
END = 0

# Logits: of a common token's six successors, of any other common token, of the rest. They sum to near one, because a
# logit near zero is what bfloat16 holds finely.
SUCCESSORS = (1.2, -0.9, -1.4, -1.9, -2.5, -3.1)
COMMON, REST = -9.5, -16.0
# So many numbers are the same in every embedding: the head reads its constants off them. Many, so that their roundings
# average out.
SHARED = 64
# Spread of what attention and MLP add to an embedding of spread 1.
ATTENTION, FEED_FORWARD = 0.5, 0.4


@dataclass(frozen=True)
class Peaked:
    """Where the two checkpoints lie, and the common tokens' ids."""

    target: Path
    drafter: Path
    common: tuple[int, ...]


def make(folder: Path, vocab: int, common: int = 256, seed: int = 0) -> Peaked:
    """Writes target and drafter to `folder`, in bfloat16: `vocab` x 2 KiB. The same for the same arguments."""
    random = torch.Generator().manual_seed(seed)
    embed = torch.randn(vocab, HIDDEN, generator=random)
    embed[:, :SHARED] = embed[END, :SHARED]
    chosen = 1 + torch.randperm(vocab - 1, generator=random)[:common]  # not END
    head = _head(embed, chosen, random)
    peaked = Peaked(folder / "target", folder / "drafter", tuple(chosen.tolist()))
    layers = {
        name: weight
        for layer in range(LAYERS)
        for name, weight in _layer(f"model.layers.{layer}.", ATTENTION, FEED_FORWARD, random).items()
    }
    target = layers | {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    _write(peaked.target, target, _config("LlamaForCausalLM", vocab, LAYERS))
    _write_tokenizer(peaked.target, vocab)
    # The drafter's layer has no norm before its attention; a little of it is left in, or its cache would not matter.
    drafter = _layer("layers.0.", 0.1, 0.1, random)
    del drafter["layers.0.input_layernorm.weight"]
    fc = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)
    drafter |= {"fc.weight": fc, "fc.bias": torch.zeros(HIDDEN)}
    _write(peaked.drafter, drafter, _config("LlamaForCausalLMEagle", vocab, 1))
    return peaked


def _head(embed: Tensor, common: Tensor, random: torch.Generator) -> Tensor:
    """[vocab, HIDDEN]: its product with an embedding is that token's row of logits, give or take a spread of one."""
    head = torch.randn(len(embed), HIDDEN, generator=random) / HIDDEN**0.5
    shared, own = embed[END].clone(), embed[common]
    shared[SHARED:] = 0
    own[:, :SHARED] = 0
    head[:, :SHARED] = REST * _dual(shared)[:SHARED]
    head[common] += (COMMON - REST) * _dual(shared)
    # Each rank is a permutation, so that every common token succeeds as many others.
    for logit in SUCCESSORS:
        successor = common[torch.randperm(len(common), generator=random)]
        head[successor] += (logit - COMMON) * _dual(own)
    return head


def _dual(rows: Tensor) -> Tensor:
    """The vectors along `rows`, [..., HIDDEN], whose product with them is one."""
    return rows / rows.square().sum(-1, keepdim=True)


def _layer(prefix: str, attention: float, feed_forward: float, random: torch.Generator) -> dict[str, Tensor]:
    def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=random) * spread / columns**0.5

    weights = {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, attention),
        "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
        "mlp.up_proj.weight": matrix(MLP, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, MLP, feed_forward),
    }
    return {prefix + name: weight for name, weight in weights.items()}


def _config(architecture: str, vocab: int, layers: int) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": END,
        "eos_token_id": END,
        "dtype": "bfloat16",
    }


def _write(folder: Path, weights: dict[str, Tensor], config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Token 7 is the word `7`: min_new_tokens wants a tokenizer, which knows the end token."""
    words = {str(token): token for token in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=str(END)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(END), "bos_token": str(END)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
