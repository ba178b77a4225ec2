"""Servers of several processes: tensor and data parallel, several tokenizer workers. Greedy output is the same."""

import pytest
from tlt_client import Client, SamplingParams

from tests.server.conftest import PROMPTS, Servers
from tests.server.test_lossless import GREEDY
from tlt_server.demo.lossless import Tokens

pytestmark = pytest.mark.server

KINDS = {
    "tokenizer workers": ["--tokenizer-worker-num", "2"],
    "tensor parallel": ["--tp-size", "2", "--arm", "3,2,6"],
    "data parallel": ["--dp-size", "2"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes(
    servers: Servers, kind: str, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "tensor parallel":
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    with Client(servers.get(KINDS[kind])) as client:
        rollouts = client.generate_batch(PROMPTS, GREEDY)
        filtered = SamplingParams(max_new_tokens=64, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02)
        sampled = client.generate_batch(PROMPTS, filtered)
        counters = client.status().counters
    servers.close()
    assert [rollout.tokens for rollout in rollouts] == expected
    assert not any(rollout.aborted for rollout in sampled)
    assert counters.drafts == sum(rollout.spec.verify_calls for rollout in rollouts + sampled if rollout.spec)
