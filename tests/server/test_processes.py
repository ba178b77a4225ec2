"""Servers of several processes: tensor and data parallel, several tokenizer workers. Greedy output is the same."""

import httpx
import psutil
import pytest
from tlt_client import Client, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm

from tests.server.conftest import PROMPTS
from tests.server.test_lossless import GREEDY
from tlt_server.demo.lossless import Tokens

pytestmark = pytest.mark.server


def answers(client: Client, expected: list[Tokens]) -> None:
    before = client.status().counters.drafts
    rollouts = client.generate_batch(PROMPTS, GREEDY)
    filtered = SamplingParams(max_new_tokens=64, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02)
    sampled = client.generate_batch(PROMPTS, filtered)
    drafts = client.status().counters.drafts - before
    assert [rollout.tokens for rollout in rollouts] == expected
    assert not any(rollout.aborted for rollout in sampled)
    assert drafts == sum(rollout.spec.verify_calls for rollout in rollouts + sampled if rollout.spec) > 0


@pytest.mark.server("two-ranks")
def test_tensor_parallel(client: Client, expected: list[Tokens]) -> None:
    client.set_strategy(StrategyUpdate("pinned", pinned=Arm(4, 3, 5)))
    answers(client, expected)


@pytest.mark.server("two-replicas")
def test_data_parallel_with_tokenizer_workers(client: Client, expected: list[Tokens]) -> None:
    answers(client, expected)


@pytest.mark.server("eagle-chain")
def test_a_server_imports_once(url: str) -> None:
    """On a CPU its processes are forks of the one that listens, which has imported all that they need."""
    port = httpx.URL(url).port
    listening = [
        c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    started = psutil.Process(listening[0]).children(recursive=True)
    assert len(started) >= 2
    assert not [process for process in started if "multiprocessing.spawn" in " ".join(process.cmdline())]
