"""What a server sends to learn from: the state of every position, equal to transformers' of the same tokens."""

import time
from collections.abc import Iterator

import pytest
import torch
from tlt_client import Client, Rollout, SamplingParams, StrategyUpdate

from tests.server.conftest import CONFIGS, PROMPTS, Servers
from tests.server.learner import Learner, Row, states
from tests.server.trainer import while_running
from tlt_server.demo.reference import Reference
from tlt_server.process import free_port

pytestmark = pytest.mark.server

SAMPLED = SamplingParams(temperature=1, max_new_tokens=96)
SPECULATING = [name for name in CONFIGS if name != "plain"]


@pytest.fixture(scope="module")
def address() -> str:
    """Of a trainer whose control link nobody listens to: features come without it."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def learner(address: str) -> Iterator[Learner]:
    place, _, port = address.rpartition(":")
    with Learner(f"{place}:{int(port) + 1}") as learner:
        yield learner


def flags(config: str, address: str, *more: str) -> list[str]:
    return [*CONFIGS[config], "--trainer", address, "--chunked-prefill-size", "16", *more]


def check(reference: Reference, prompt: tuple[int, ...], rollout: Rollout, found: dict[int, list[Row]]) -> set[int]:
    """Every row is its position's; returns the positions that have one."""
    tokens = [*prompt, *rollout.tokens]
    final, lower = states(reference, tokens)
    for position, rows in found.items():
        for row in rows:
            assert row.token == tokens[position]
            wanted = final if row.finals is None else lower
            torch.testing.assert_close(row.hidden, wanted[position], atol=2e-4, rtol=1e-3)
            if row.finals is not None:
                torch.testing.assert_close(row.finals, final[position], atol=2e-4, rtol=1e-3)
    return set(found)


@pytest.mark.parametrize("config", SPECULATING)
def test_every_position_has_its_state(
    servers: Servers, learner: Learner, address: str, reference: Reference, config: str
) -> None:
    """Prompts in chunks and out of the radix cache, responses that end in the middle of a step, off in between."""
    with Client(servers.get(flags(config, address))) as client:
        rounds = [client.generate_batch(PROMPTS, SAMPLED)]

        def switch() -> None:
            for mode in ("off", "pinned", "off"):
                time.sleep(0.2)
                client.set_strategy(StrategyUpdate(mode))

        rounds.append(while_running(lambda: client.generate_batch(PROMPTS, SAMPLED), switch))
        rounds.append(client.generate_batch(PROMPTS, SAMPLED))
    for answers in rounds:
        for text, rollout in zip(PROMPTS, answers, strict=True):
            prompt = reference.tokens(text)
            end = len(prompt) + len(rollout.tokens)
            wanted = set(range(rollout.cached_tokens, end - 1))
            found = check(reference, prompt, rollout, learner.of(rollout.rid, wanted))
            assert wanted <= found <= wanted | {end - 1}
            assert {row.target_version for rows in learner.rows[rollout.rid].values() for row in rows} == {0}
    assert max(rollout.cached_tokens for rollout in rounds[1]) > 0
    assert len({learner.groups[rollout.rid] for answers in rounds for rollout in answers}) == len(set(PROMPTS))
