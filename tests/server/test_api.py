"""The doors: SGLang's, OpenAI's, ours, and SGLang's own benchmark client."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import httpx
import openai
import pytest
from tlt_client import AsyncClient, Client, SamplingParams

from tests.forks import ran
from tlt_server.errors import ServerFailed
from tlt_server.trainer.data.replay import replay

pytestmark = pytest.mark.server("eagle-chain")


def test_status(url: str) -> None:
    with Client(url) as client:
        client.generate("What is 3*4?\n", SamplingParams(max_new_tokens=16))
        status = client.status()
    assert status.sglang_version.startswith("0.5.17+tlt.")
    assert status.speculation
    assert status.arm is not None
    assert (status.arm.num_steps, status.arm.topk, status.arm.num_draft_tokens) == (3, 1, 4)
    assert status.accept_length.total is not None
    assert 1 <= status.accept_length.total <= 4
    assert "tokens on average" in status.help


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": "What is 3*4?\n", "sampling_params": {"max_new_tokens": 8}}),
        ("/v1/completions", {"model": "m", "prompt": "What is 3*4?\n", "max_tokens": 8}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "3*4"}], "max_tokens": 8}),
    ],
)
def test_curl(url: str, route: str, body: dict[str, object]) -> None:
    command = ["curl", "-sf", f"{url}{route}", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert answer.get("text") or answer["choices"]


def test_the_openai_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        completion = client.completions.create(model="m", prompt="What is 3*4?\n", max_tokens=16, n=2)
        assert [choice.text != "" for choice in completion.choices] == [True, True]
        chat = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "What is 3*4?"}], max_tokens=16
        )
        assert chat.choices[0].message.content


def test_streaming(url: str) -> None:
    with Client(url) as client:
        chunks = list(client.stream("What is 12*34?\n", SamplingParams(max_new_tokens=40)))
    whole = chunks[-1].rollout
    assert whole is not None
    assert tuple(token for chunk in chunks for token in chunk.tokens) == whole.tokens
    assert "".join(chunk.text for chunk in chunks) == whole.text


@pytest.mark.anyio
async def test_the_async_client(url: str) -> None:
    async with AsyncClient(url) as client:
        rollouts = await client.generate_group("What is 12*34?\n", 4, SamplingParams(max_new_tokens=24))
    assert len({rollout.rid for rollout in rollouts}) == 4


def test_bench_serving(url: str, tmp_path: Path) -> None:
    """SGLang's own load generator runs against the server unchanged."""
    host, port = url.removeprefix("http://").split(":")
    flags = ["--backend", "sglang", "--host", host, "--port", port, "--dataset-name", "random-ids"]
    flags += ["--num-prompts", "8", "--random-input-len", "16", "--random-output-len", "32"]
    flags += ["--output-file", str(tmp_path / "bench.jsonl")]
    log = tmp_path / "log"
    assert ran(flags, log, "sglang.bench_serving") == 0, log.read_text()
    assert json.loads((tmp_path / "bench.jsonl").read_text())["completed"] == 8


def test_prompts_are_replayed_for_a_trainer_alone(url: str) -> None:
    with pytest.raises(ServerFailed, match="connected to no drafter trainer: start both"):
        list(replay(url, ["What is 3*4?\n"], 1, SamplingParams(max_new_tokens=8), at_once=1))


def test_two_servers_on_one_port(url: str) -> None:
    port = url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "tlt_server", "serve", "--host", "127.0.0.1", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200


def test_who_asks_for_its_health_waits_for_one_token(url: str) -> None:
    """Upstream's answer never comes within a second."""
    answers = [httpx.get(f"{url}/health", timeout=30) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert min(answer.elapsed for answer in answers) < timedelta(seconds=0.9)
