"""RL trainers' own classes, as published, take steps with weights that change. They run in processes of their own: a
stand-in for vLLM is on their path.

What a trainer knows of its samples is held against what sampled them: each step's by that step's weights, alone.
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from benchmarks.lib.reload.trainer import Trainer
from tests.forks import ran
from tlt_server.demo import default_paths

SAME = {"temperature": 0.0, "max_new_tokens": 24, "skip_special_tokens": False}
STAND_IN = Path(__file__).with_name("vllm_stand_in")
AGREES = 1e-4
"""Nats between a token's logprob by the server and by the trainer's own model, both float32. Another step's weights
are off by 0.01 and more."""


@pytest.fixture
def steps(
    url: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> Callable[[str, int], dict[str, Any]]:
    """Lets a trainer take its steps, and checks that the server ends with the weights that it sent last."""

    def take(module: str, count: int) -> dict[str, Any]:
        out, log = tmp_path / "found.json", tmp_path / "log"
        paths = os.pathsep.join([str(STAND_IN), *sys.path])
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        code = ran([url, str(out), str(count)], log, f"tests.server.{module}", environment)
        assert code == 0, log.read_text()[-3000:]
        found: dict[str, Any] = json.loads(out.read_text())
        assert found["steps"] == count
        trainer = Trainer(url)
        sent = trainer.checksums()
        trainer.disk(tmp_path / "final").raise_for_status()
        assert trainer.checksums() == sent
        trainer.http.close()
        record_property("steps", count)
        return found

    yield take
    httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(default_paths()[0])}).raise_for_status()


@pytest.mark.server("vllm")
def test_trl_grpo(steps: Any, record_property: Callable[[str, Any], None]) -> None:
    found = steps("trl_grpo", 5)
    record_property("trl_steps", found["steps"])
    assert len(found["losses"]) == 5
    assert all(math.isfinite(loss) for loss in found["losses"])
    assert len(found["sampled"]) == 5 * 8
    made_by = [{version["version"] for version in each["versions"]} for each in found["sampled"]]
    first = min(int(name) for names in made_by for name in names)
    wanted = [{str(first + each["step"])} for each in found["sampled"]]
    stale = sum(made != want for made, want in zip(made_by, wanted, strict=True))
    record_property("stale_rollouts", stale)
    assert not stale


def is_current(found: dict[str, Any], record_property: Callable[[str, Any], None]) -> bool:
    """Whether each sample's logprobs are by the weights that its trainer had sent."""
    stale = sum(mismatch > AGREES for mismatch in found["mismatches"])
    record_property("stale_rollouts", stale)
    return not stale


@pytest.mark.server("vllm")
def test_trl_async_grpo(steps: Any, record_property: Callable[[str, Any], None]) -> None:
    found = steps("trl_async", 3)
    assert len(found["mismatches"]) == 36
    assert is_current(found, record_property)


@pytest.mark.server("vllm")
def test_skyrl(steps: Any, record_property: Callable[[str, Any], None]) -> None:
    found = steps("skyrl_steps", 3)
    assert len(found["mismatches"]) == 24
    assert is_current(found, record_property)


@pytest.mark.server("vllm")
def test_prime_rls_renderer(url: str) -> None:
    """Its tokens in, tokens out, by the client that prime-rl samples with."""
    tokenizer = AutoTokenizer.from_pretrained(default_paths()[0])
    prompt = tokenizer.encode("What is 12*3?\n")
    asked = {"temperature": 0.0, "max_tokens": 24, "skip_special_tokens": False}

    async def sample() -> dict[str, Any]:
        from renderers import DefaultRenderer
        from renderers.client import generate

        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = (await client.models.list()).data[0].id
            given = {"model": model, "messages": [], "prompt_ids": prompt, "sampling_params": asked, "cache_salt": "1"}
            found: dict[str, Any] = await generate(client=client, renderer=DefaultRenderer(tokenizer), **given)
            return found

    found = asyncio.run(sample())
    said = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": SAME}).json()
    assert found["completion_ids"] == said["output_ids"]
    assert len(found["completion_logprobs"]) == len(said["output_ids"])
    assert found["finish_reason"] == said["meta_info"]["finish_reason"]["type"]
