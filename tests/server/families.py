"""Other families of models than the demo's, which speaks Llama's dialect: tiny random checkpoints, served and updated.

    python -m tests.server.families --json tests/server/families.json    every one: half a minute each

The tests take a sample, and hold that the kept result has every one.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from safetensors.torch import load_file, save_file

from tlt_server import results
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.drafter.folder import create
from tlt_server.engine.cpu.torchvision import mend_torchvision
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
"""Those that drafters are made for. MiMo is Qwen2 by another name; of its MTP head, tests/server/mtp.py."""
SHIFT = 7
PROMPTS = [[5, 17, 33, 60, 90, 12], [200, 100, 50, 25]]
LENGTH = 12
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


def tiny(family: str, folder: Path, seed: int = 0, shift: int | None = None) -> Path:
    """A checkpoint of random weights, of transformers' `{family}ForCausalLM`, with the demo's tokenizer. shift: its
    layers do little, and its head's rows are the embedding's, so many further: each token has a likeliest next one."""
    known = "Qwen2" if family == "MiMo" else family
    config = getattr(transformers, f"{known}Config")(**SMALL | OWN.get(family, {}))
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


def serve_and_update(family: str, folder: Path) -> None:
    """Greedy answers are transformers', before and after updates; no drafter can be trained for it.

    Raises:
        AssertionError: they are not.
    """
    first, second = tiny(family, folder / "first", seed=0), tiny(family, folder / "second", seed=1)
    arguments = ["--model-path", str(first), "--no-speculation", "--max-total-tokens", "2048"]
    with running_server(arguments, folder / "server.log") as url:
        assert answered(url) == expected(first)
        for target in (first, second):
            updated = httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(target)}, timeout=60)
            assert updated.json()["success"], updated.text
            assert answered(url) == expected(target)
        shared = httpx.post(f"{url}/tlt/v1/target/share", json={"path": str(folder / "shared")}, timeout=60)
        assert shared.status_code == 400
        assert "ForCausalLM does not give its embedding and head away" in shared.text
        assert httpx.get(f"{url}/tlt/v1/status", timeout=60).json()["speculation"] is False


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


def draft_and_update(family: str, kind: DrafterKind, folder: Path) -> None:
    """With a drafter greedy answers are transformers', before and after updates of target and drafter.

    Raises:
        AssertionError: they are not, or an EAGLE drafter guesses nothing.
    """
    first, second = (tiny(family, folder / str(seed), seed, shift=SHIFT) for seed in (0, 1))
    drafters = [guessing(target, folder / f"drafter-{target.name}", kind) for target in (first, second)]
    arguments = ["--model-path", str(first), "--drafter", str(drafters[0]), "--arm", "3,1,4"]
    with running_server([*arguments, "--max-total-tokens", "2048"], folder / "server.log") as url:
        assert answered(url) == expected(first)
        counters = httpx.get(f"{url}/tlt/v1/status", timeout=60).json()["counters"]
        assert counters["drafts"] > 0
        assert kind is DrafterKind.EAGLE3 or counters["accepted_tokens"] > 2 * counters["drafts"]
        updated = httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(second)}, timeout=60)
        assert updated.json()["success"], updated.text
        assert answered(url) == expected(second)
        updated = httpx.post(f"{url}/tlt/v1/drafter/update", json={"path": str(drafters[1])}, timeout=60)
        assert updated.status_code == 200, updated.text
        assert answered(url) == expected(second)


def answered(url: str) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    asked = {"input_ids": PROMPTS, "sampling_params": sampling}
    given = httpx.post(f"{url}/generate", json=asked, timeout=60).raise_for_status().json()
    return [each["output_ids"] for each in given]


def expected(folder: Path) -> list[list[int]]:
    """transformers' greedy continuation."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continued = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(LENGTH):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        continued.append(tokens[0, len(prompt) :].tolist())
    return continued


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the result: 1 for each family")
    path = parser.parse_args().json
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        for family in FAMILIES:
            serve_and_update(family, Path(folder, family))
            sys.stdout.write(f"{family}\n")
        for family, kind in DRAFTED:
            draft_and_update(family, kind, Path(folder, f"drafted-{family}-{len(kind)}"))
            sys.stdout.write(f"{family}, {kind}\n")
    argv = ["python", "-m", "tests.server.families", *sys.argv[1:]]
    results.write(results.measured_here("families", argv, dict.fromkeys(every(), 1)), path)


def every() -> list[str]:
    """The figures of the kept result."""
    return [*FAMILIES, *(f"{family}_{kind}" for family, kind in DRAFTED)]


if __name__ == "__main__":
    main()
