"""The experts of a response's tokens: those that the target routes the same tokens to, whatever drafted them."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tlt_client import Client
from tlt_client.schemas import Arm, StrategyUpdate

from benchmarks.models import heads
from benchmarks.models.families import PROMPTS, SHIFT, guessing, tiny
from tests.server.conftest import SEVERAL
from tests.server.gpu_routed_experts import EXPERTS, asked, rows_of
from tests.server.test_arms import ANY_ARM
from tests.server.warm import warm_server
from tlt_server.config import DrafterKind

pytestmark = pytest.mark.server
# prompts come in chunks, and fewer tokens than a batch of trees verifies: upstream's buffer would be too small for it
TIGHT = ["--chunked-prefill-size", "8", "--max-total-tokens", "1500"]


class Models(NamedTuple):
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A mixture of experts, and a drafter whose best guess is often not the right one, so that other branches are."""
    base = tmp_path_factory.mktemp("experts")
    target = tiny("Qwen3Moe", base / "target", shift=SHIFT)
    file = guessing(target, base / "drafter", DrafterKind.EAGLE) / "model.safetensors"
    tensors = load_file(file)
    noise = torch.empty_like(tensors["fc.weight"]).normal_(std=0.08, generator=torch.Generator().manual_seed(0))
    save_file(tensors | {"fc.weight": tensors["fc.weight"] + noise}, file, metadata={"format": "pt"})
    return Models(target, file.parent)


@pytest.fixture(scope="module")
def url(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ["--model-path", str(models.target), "--drafter", str(models.drafter), *SEVERAL, *EXPERTS, *TIGHT]
    with warm_server(arguments, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@cache
def routed(target: Path, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """By transformers: [tokens, layers, experts of a token], each token's in ascending order; 0 in dense layers."""
    model = loaded(target)
    found = torch.zeros(len(tokens), len(model.model.layers), model.config.num_experts_per_tok, dtype=torch.int64)
    hooks = []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):

            def note(_: Any, arguments: tuple[Any, ...], number: int = number) -> None:
                found[:, number] = arguments[1].sort().values

            hooks.append(layer.mlp.experts.register_forward_pre_hook(note))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.asarray(found)


@cache
def loaded(target: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def check(target: Path, answers: Sequence[dict[str, Any]], start: int = 0) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        read = (*prompt, *answer["output_ids"][:-1])  # nobody has read the last one
        wanted = routed(target, read)[start:]
        found = rows_of(answer, wanted.shape[2])
        assert found.shape == wanted.shape
        assert (np.sort(found) == wanted).all()


def test_plain_decoding_tells_what_the_target_routes(models: Models, tmp_path: Path) -> None:
    arguments = ["--model-path", str(models.target), "--no-speculation", *EXPERTS, *TIGHT]
    with warm_server(arguments, tmp_path / "log") as url:
        check(models.target, asked(url))


def test_speculation_tells_the_same(models: Models, url: str) -> None:
    """Another arm at every step, trees and none among them; the second time from the cache."""
    with Client(url) as client:
        client.set_strategy(ANY_ARM)
    for start in (0, 3):
        answers = asked(url, start)
        check(models.target, answers, start)
    drafted = [answer["meta_info"] for answer in answers if len(answer["output_ids"]) > 24]
    lengths = [each["completion_tokens"] / (each["spec_verify_ct"] + 1) for each in drafted]
    assert 1.3 < sum(lengths) / len(lengths) < 5, "some drafts are accepted, and some are not"


def test_so_does_each_way_to_decode(models: Models, url: str) -> None:
    with Client(url) as client:
        for update in (StrategyUpdate("off"), StrategyUpdate("pinned", pinned=Arm(5, 4, 16))):
            client.set_strategy(update)
            client.flush_cache()
            check(models.target, asked(url))


def test_after_a_publication_they_are_the_new_targets(models: Models, url: str, tmp_path: Path) -> None:
    second = tiny("Qwen3Moe", tmp_path / "second", seed=1, shift=SHIFT)
    for target in (second, models.target):
        body = {"model_path": str(target), "flush_cache": True}
        httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
        check(target, asked(url))


def test_so_does_drafting_by_an_mtp_head(tmp_path: Path) -> None:
    """It has experts of its own, which are nobody's business; and the target's first layer has none."""
    target = heads.target(heads.GLM, tmp_path / "target", seed=0)
    arguments = ["--model-path", str(target), "--drafter", "mtp", "--arm", "3,1,4", *EXPERTS]
    with warm_server(arguments, tmp_path / "log") as url:
        check(target, asked(url))


def test_a_response_that_is_streamed_has_them_at_its_end(models: Models, url: str) -> None:
    body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0}}
    with httpx.stream("POST", f"{url}/generate", json=body | {"return_routed_experts": True, "stream": True}) as answer:
        chunks = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert '"routed_experts":"' in chunks[-1].replace(": ", ":")
