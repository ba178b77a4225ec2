"""What slime asks for at its start: values that no update would leave behind."""

from pathlib import Path

import pytest
from tlt_client import Client, SamplingParams

from tests.server.conftest import PROMPTS
from tests.server.trainer import DRAFTERS, Trainer, changed, noisy
from tlt_server.demo import default_paths

TARGET, _ = default_paths()
GREEDY = SamplingParams(temperature=0, max_new_tokens=48)
SHARED = {"draft.model.embed_tokens.weight", "draft.lm_head.weight"}


def said(client: Client) -> tuple[list[tuple[int, ...]], float]:
    """What a server says, and its accept length."""
    rollouts = client.generate_batch(PROMPTS, GREEDY)
    accepted = [rollout.accept_length for rollout in rollouts if rollout.accept_length]
    return [tuple(rollout.tokens) for rollout in rollouts], sum(accepted) / len(accepted)


def checked(trainer: Trainer, action: str) -> int:
    return trainer.post("/weights_checker", action=action).status_code


@pytest.mark.parametrize("config", DRAFTERS)
@pytest.mark.server
def test_a_reset_means_the_target(trainer: Trainer, client: Client) -> None:
    trainer.disk(TARGET, weight_version="start").raise_for_status()
    tokens, length = said(client)
    before = trainer.checksums()
    assert checked(trainer, "reset_tensors") == 200
    differs = changed(before, trainer.checksums())
    assert {name for name in differs if name.startswith("draft.")} <= SHARED
    assert "model.norm.weight" in differs
    refused = trainer.http.post("/generate", json={"text": "1"}, headers={"X-TLT-Weight-Version": "start"})
    assert refused.status_code == 409
    trainer.disk(TARGET, flush_cache=False).raise_for_status()
    assert trainer.checksums() == before
    again, length_again = said(client)
    assert again == tokens
    assert abs(length_again - length) < 0.3
    assert checked(trainer, "unheard_of") == 400


@pytest.mark.parametrize("config", DRAFTERS)
@pytest.mark.server
def test_an_update_heals_any_drafter(trainer: Trainer, client: Client, config: str, tmp_path: Path) -> None:
    start = DRAFTERS[config]
    trainer.http.put("/tlt/v1/drafter/watchdog", json={"mode": "observe"}).raise_for_status()
    trainer.drafter(start).raise_for_status()
    tokens, length = said(client)
    before = trainer.checksums()
    alone = trainer.post("/weights_checker", action="draft.checksum").json()["ranks"][0]["checksums"]
    assert {f"draft.{name}": each for name, each in alone.items()}.items() <= before[0].items()
    assert checked(trainer, "draft.reset_tensors") == 200
    differs = changed(before, trainer.checksums())
    assert differs
    assert {
        name for name in differs if not name.startswith("draft.") or name in SHARED - {"draft.lm_head.weight"}
    } == set()
    assert said(client)[0] == tokens  # lossless, with a drafter of noise
    trainer.drafter(noisy(start, tmp_path / "noisy", 3)).raise_for_status()
    trainer.drafter(start).raise_for_status()
    assert trainer.checksums() == before
    again, length_again = said(client)
    assert again == tokens
    assert abs(length_again - length) < 0.3


@pytest.mark.server("plain")
def test_without_a_drafter_there_is_none_to_check(trainer: Trainer) -> None:
    answer = trainer.post("/weights_checker", action="draft.checksum")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "without a drafter" in answer.json()["message"]
