"""Without speculation a server serves what SGLang serves: families that cannot say what a drafter would ask of them."""

from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.families import tiny
from tlt_server.process import running_server

PROMPTS = [[5, 17, 33, 60, 90, 12], [200, 100, 50, 25]]
LENGTH = 12


def answered(url: str) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    asked = {"input_ids": PROMPTS, "sampling_params": sampling}
    given = httpx.post(f"{url}/generate", json=asked, timeout=60).raise_for_status().json()
    return [each["output_ids"] for each in given]


def expected(folder: Path) -> list[list[int]]:
    """transformers' greedy continuation."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continued = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(LENGTH):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        continued.append(tokens[0, len(prompt) :].tolist())
    return continued


@pytest.mark.parametrize("family", ["Olmo2", "Olmoe", "Mixtral", "Gemma2", "Granite", "Starcoder2"])
def test_it_starts_answers_and_is_updated(family: str, tmp_path: Path) -> None:
    """Olmo, Gemma and Phimoe do so too; InternLM2 needs code from the hub."""
    first, second = tiny(family, tmp_path / "first", seed=0), tiny(family, tmp_path / "second", seed=1)
    arguments = ["--model-path", str(first), "--no-speculation", "--max-total-tokens", "2048"]
    with running_server(arguments, tmp_path / "server.log") as url:
        assert answered(url) == expected(first)
        for folder in (first, second):
            updated = httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=60)
            assert updated.json()["success"], updated.text
            assert answered(url) == expected(folder)
        shared = httpx.post(f"{url}/tlt/v1/target/share", json={"path": str(tmp_path / "shared")}, timeout=60)
        assert shared.status_code == 400
        assert "ForCausalLM does not give its embedding and head away" in shared.text
        assert httpx.get(f"{url}/tlt/v1/status", timeout=60).json()["speculation"] is False
