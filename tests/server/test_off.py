"""Speculation turned off and on again while requests run: they notice nothing, and no count lies about it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tlt_client import Client, SamplingParams, StrategyUpdate, VersionConflict

from tests.server.conftest import CONFIGS, PROMPTS, Servers
from tlt_server.demo.lossless import Tokens

pytestmark = pytest.mark.server

OFF, ON = StrategyUpdate("off"), StrategyUpdate("pinned")
SPECULATING = [name for name in CONFIGS if name != "plain"]


@pytest.fixture(params=SPECULATING)
def speculating(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Client]:
    with Client(servers.get(CONFIGS[request.param])) as client:
        yield client
        client.set_strategy(ON)


def test_off_and_on_under_load(speculating: Client, expected: list[Tokens]) -> None:
    """At random moments of greedy streams; logprobs are those of the tokens."""
    client, draw = speculating, random.Random(3)
    sampling = SamplingParams(temperature=0, max_new_tokens=96)
    with ThreadPoolExecutor(1) as pool:
        rounds = [pool.submit(client.generate_batch, PROMPTS, sampling, logprobs=True) for _ in range(3)]
        switches = 0
        while not rounds[-1].done():
            client.set_strategy(draw.choice([OFF, ON]))
            switches += 1
    assert switches > 20
    for answers in rounds:
        assert [rollout.tokens for rollout in answers.result()] == expected
        assert all(max(rollout.logprobs or [1]) <= 0 for rollout in answers.result())
    assert {event.kind for event in client.events()} >= {"speculation_on", "speculation_off"}


def test_off_is_off(speculating: Client, expected: list[Tokens]) -> None:
    client, sampling = speculating, SamplingParams(temperature=0, max_new_tokens=96)
    before = client.status().counters
    assert not client.set_strategy(OFF).on
    answers = client.generate_batch(PROMPTS, sampling)
    assert [rollout.tokens for rollout in answers] == expected
    assert {rollout.accept_length for rollout in answers} == {None}
    status = client.status()
    assert (status.counters, status.arm) == (before, None)
    assert status.help == "speculation is off: it was asked for"
    assert client.set_strategy(ON) == client.strategy()
    assert client.strategy().on
    (again,) = client.generate_batch(PROMPTS[:1], sampling)
    assert again.tokens == expected[0]
    assert (again.accept_length or 0) > 1.5


def test_a_server_without_a_drafter(servers: Servers) -> None:
    with Client(servers.get(CONFIGS["plain"])) as client:
        assert not client.strategy().on
        with pytest.raises(VersionConflict, match="without a drafter"):
            client.set_strategy(ON)
