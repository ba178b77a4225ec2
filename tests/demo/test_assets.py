"""The embedded checkpoints: what is stored, that a trainer's tokenizer reads it, that the drafters know the target."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import problems
from tlt_server.demo.training.evaluate import evaluate
from tlt_server.trainer.publish.folder import load_drafter

TARGET, DRAFTER = default_paths()
EAGLE3 = eagle3_path()


def _names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return set(weights.keys())


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in TARGET.parent.rglob("*") if path.is_file()) <= 12_000_000


@pytest.mark.parametrize("folder", [DRAFTER, EAGLE3])
def test_drafters_fit_the_target_and_keep_off_what_is_its_own(folder: Path) -> None:
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in _names(folder))
    target, drafter = (json.loads((path / "config.json").read_text()) for path in (TARGET, folder))
    shared = ("vocab_size", "hidden_size", "max_position_embeddings", "rope_theta", "eos_token_id")
    assert [drafter[key] for key in shared] == [target[key] for key in shared]


def test_tokenizer_keeps_any_text_and_chat_is_the_task_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    problem = problems(1, 0)[0]
    message = [{"role": "user", "content": problem.prompt.strip()}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    assert chat["input_ids"] == tokenizer(problem.prompt).input_ids
    for text in ("What is 12*3?\n", "né 日本 \x00\t12,5 <html>", " \n  two  spaces "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("4711").input_ids) == 4
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


@pytest.mark.slow
def test_figures_hold_on_a_small_sample() -> None:
    torch.set_num_threads(1)
    target, tokenizer = load_target(TARGET), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    drafters = {"eagle": load_drafter(DRAFTER).network, "eagle3": load_drafter(EAGLE3).network}
    figures = evaluate(target, drafters, tokenizer, count=24)
    # a mean over some 1000 passes; the README has the figures of 4096 rollouts
    assert figures["accept_length_eagle"] > 3.75
    assert figures["accept_length_eagle3"] > 3.75
    assert figures["accept_length_ngram"] < figures["accept_length_eagle"] / 1.3
    assert 0.05 < figures["entropy_nats"] < 0.25
