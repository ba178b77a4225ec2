"""What is cached of a prompt is of the weights in force: with speculation or not, on every rank alike."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tlt_client import Client, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm

from tests.server.conftest import PROMPTS, greedy
from tests.server.trainer import Trainer, buckets, noisy, tensors_of
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server

TARGET, _ = default_paths()
GREEDY = SamplingParams(temperature=0, max_new_tokens=24)


@pytest.fixture(params=["eagle-chain", "plain", "two-ranks"])
def config(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ranked(url: str, client: Client, config: str) -> Iterator[Trainer]:
    if config == "two-ranks":
        client.set_strategy(StrategyUpdate("pinned", pinned=Arm(3, 1, 4)))
    trainer = Trainer(url, ranks=2 if config == "two-ranks" else 1)
    yield trainer
    trainer.disk(TARGET).raise_for_status()
    trainer.close()


def in_place(trainer: Trainer, model: Path, parts: int) -> None:
    """A publication that flushes nothing."""
    trainer.post("/pause_generation", mode="in_place").raise_for_status()
    for part in buckets(tensors_of(model), parts):
        trainer.tensor([part] * trainer.ranks, flush_cache=False).raise_for_status()
    trainer.post("/continue_generation").raise_for_status()


def test_a_prefix_of_weights_that_are_gone_is_read_by_none(ranked: Trainer, client: Client, tmp_path: Path) -> None:
    ranked.disk(TARGET).raise_for_status()
    assert client.generate(PROMPTS[0], GREEDY).cached_tokens == 0
    assert client.generate(PROMPTS[0], GREEDY).cached_tokens > 0
    moved = noisy(TARGET, tmp_path / "moved", seed=8, scale=0.1)
    for parts, model in ((1, moved), (3, TARGET)):
        in_place(ranked, model, parts)
        expected = greedy(Reference(model), PROMPTS[0], 24)
        first, again = (client.generate(PROMPTS[0], GREEDY) for _ in range(2))
        assert (first.cached_tokens, first.tokens, again.tokens) == (0, expected, expected)
        assert again.cached_tokens > 0
    refused = ranked.disk(tmp_path / "nowhere", flush_cache=False)
    assert refused.status_code == 400
    assert client.generate(PROMPTS[0], GREEDY).cached_tokens > 0  # what was refused has changed nothing
