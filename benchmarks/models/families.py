"""Tiny random checkpoints of many families of models, served and updated: what a family's cells in the matrix are.

Greedy answers are held against transformers', in float32: wide logit gaps, so that what is shown is plumbing (keys and
values, masks, positions), not numerics.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import torch
import transformers
from safetensors.torch import load_file, save_file

from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.drafter.capability import require_drafted
from tlt_server.drafter.folder import create
from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config
from tlt_server.process import running_server

mend_torchvision()  # transformers imports it

FAMILIES = ("Olmo", "Olmo2", "Olmoe", "Mixtral", "Phimoe", "Gemma", "Gemma2", "Granite", "Starcoder2")
"""InternLM2 needs code from the hub."""
DRAFTED = tuple(
    (family, kind)
    for family in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Glm4Moe", "Mistral", "Phi3", "Glm4", "MiMo")
    for kind in DrafterKind
    if kind is DrafterKind.EAGLE or family not in ("Glm4", "MiMo")
)
"""Those that drafters are made for. MiMo is Qwen2 by another name; of its MTP head, models/heads.py."""
SHIFT = 7
PROMPTS = [[(7 + 31 * row + 53 * column) % 290 + 2 for column in range(4 + row % 5)] for row in range(20)]
LENGTH = 24
Serve = Callable[[Sequence[str], Path], AbstractContextManager[str]]
"""Runs a server with these flags, its output in that file, and gives its URL."""
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
EXPERTS = {"moe_intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16} | MIXED
OWN: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []} | EXPERTS,
    "Glm4Moe": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | EXPERTS,
    "Mistral": {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": None},
    "Phi3": {"num_hidden_layers": 4},
    "Llama": {"num_hidden_layers": 4, "head_dim": 16},
    "Qwen2": {"num_hidden_layers": 4},
    "Qwen3": {"num_hidden_layers": 4, "head_dim": 16},
    "Glm4": {"num_hidden_layers": 4, "head_dim": 16, "attention_bias": True},
    "MiMo": {"num_hidden_layers": 4, "architectures": ["MiMoForCausalLM"]},
    "Mixtral": {"num_local_experts": 4} | MIXED,
    "Phimoe": {"num_local_experts": 4, "architectures": ["PhiMoEForCausalLM"]} | MIXED,
    "Olmo": {"num_key_value_heads": 4},
    "Olmoe": {"num_experts": 4, "num_key_value_heads": 4} | MIXED,
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh"},
}
"""What a family's configuration has beside, as its published checkpoints do."""


def tiny(
    family: str, folder: Path, seed: int = 0, shift: int | None = None, sizes: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """A checkpoint of random weights, of transformers' `{family}ForCausalLM`, with the demo's tokenizer. shift: its
    layers do little, and its head's rows are the embedding's, so many further: each token has a likeliest next one.
    sizes: in place of those in SMALL and OWN."""
    known = "Qwen2" if family == "MiMo" else family
    config = getattr(transformers, f"{known}Config")(**SMALL | OWN.get(family, {}) | dict(sizes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{known}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2 if shift is None else 0.05)
            elif shift is not None and name.endswith(("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")):
                parameter.mul_(0.05)  # GLM-4's, of what a layer adds
        if shift is not None:
            embedding = model.get_input_embeddings().weight.normal_()
            model.get_output_embeddings().weight.copy_(embedding.roll(-shift, 0))
    model.save_pretrained(folder)
    if architectures := OWN.get(family, {}).get("architectures"):
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"architectures": architectures}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_paths()[0] / file, folder / file)
    return folder


def guessing(target: Path, folder: Path, kind: DrafterKind) -> Path:
    """A drafter for a `tiny` target with a shift. EAGLE's guesses what it says: its state is the embedding."""
    create(str(target), folder, kind)
    if kind is DrafterKind.EAGLE3:
        return folder
    file = folder / "model.safetensors"
    tensors = load_file(file)
    hidden = len(tensors["fc.weight"])
    tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1).to(tensors["fc.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def serve_and_update(family: str, folder: Path, serve: Serve = running_server) -> None:
    """A server without a drafter says what transformers says, before and after updates; a drafter is refused in words.

    Raises:
        AssertionError: it is not so.
    """
    first, second = tiny(family, folder / "first", seed=0), tiny(family, folder / "second", seed=1)
    assert all("--no-speculation" in (_refusal(first, kind) or "") for kind in DrafterKind)
    arguments = ["--model-path", str(first), "--no-speculation", "--max-total-tokens", "2048"]
    with serve(arguments, folder / "server.log") as url:
        assert answered(url) == expected(first)
        for target in (first, second):
            _done(httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(target)}, timeout=60))
            assert answered(url) == expected(target)
        shared = httpx.post(f"{url}/tlt/v1/target/share", json={"path": str(folder / "shared")}, timeout=60)
        assert shared.status_code == 400
        assert "ForCausalLM does not give its embedding and head away" in shared.text
        assert httpx.get(f"{url}/tlt/v1/status", timeout=60).json()["speculation"] is False


def draft_and_update(family: str, kind: DrafterKind, folder: Path, serve: Serve = running_server) -> None:
    """With a drafter, too: one that `auto` makes decodes plainly, `drafter init`'s is exchanged for it, then the target
    and the drafter again. A kind that the family is not drafted for by is refused.

    Raises:
        AssertionError: it is not so, or an EAGLE drafter guesses nothing.
    """
    first, second = (tiny(family, folder / str(seed), seed, shift=SHIFT) for seed in (0, 1))
    assert all(_refusal(first, other) for other in DrafterKind if (family, other) not in DRAFTED)
    drafters = [guessing(target, folder / f"drafter-{target.name}", kind) for target in (first, second)]
    arguments = ["--model-path", str(first), "--drafter", "auto", "--drafter-kind", kind, "--arm", "3,1,4"]
    with serve([*arguments, "--max-total-tokens", "4096"], folder / "server.log") as url:
        assert answered(url) == expected(first)
        assert counted(url)["drafts"] == 0
        for drafter, target in zip(drafters, (first, second), strict=True):
            _done(httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(target)}, timeout=60))
            assert answered(url) == expected(target)
            _done(httpx.post(f"{url}/tlt/v1/drafter/update", json={"path": str(drafter)}, timeout=60))
            before, answers, after = counted(url), answered(url), counted(url)
            drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted_tokens"))
            assert answers == expected(target)
            assert drafts > 0
            assert kind is DrafterKind.EAGLE3 or accepted > 2 * drafts


def _refusal(target: Path, kind: DrafterKind) -> str | None:
    try:
        require_drafted(read_config(target), kind, "the target")
    except ConfigError as refused:
        return str(refused)
    return None


def _done(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


def counted(url: str) -> dict[str, int]:
    """`drafts`, `accepted_tokens` and so on, since the start."""
    found: dict[str, int] = httpx.get(f"{url}/tlt/v1/status", timeout=60).raise_for_status().json()["counters"]
    return found


def answered(url: str) -> list[list[int]]:
    """Greedy answers to PROMPTS, all at once."""
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    asked = {"input_ids": PROMPTS, "sampling_params": sampling}
    given = httpx.post(f"{url}/generate", json=asked, timeout=60).raise_for_status().json()
    return [each["output_ids"] for each in given]


@cache
def expected(folder: Path) -> list[list[int]]:
    """transformers' greedy continuations of PROMPTS."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continued = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(LENGTH):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        continued.append(tokens[0, len(prompt) :].tolist())
    return continued
