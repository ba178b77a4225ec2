"""EAGLE-3's map of tokens, d2t, follows a swap: upstream reads it once at start, and its captured loop holds it."""

import json
from pathlib import Path

import pytest
import torch
from tlt_client import Client, SamplingParams

from tests.server.conftest import PROMPTS, Servers
from tests.server.trainer import Trainer, copied, tensors_of
from tlt_server.demo import default_paths, eagle3_path

pytestmark = pytest.mark.server

KEPT = 200
GREEDY = SamplingParams(temperature=0, max_new_tokens=64)


def made(folder: Path, tokens: torch.Tensor) -> Path:
    """An EAGLE-3 drafter whose own vocabulary is these tokens of the target's, in this order."""
    head = tensors_of(default_paths()[0])["lm_head.weight"]
    own = {"lm_head.weight": head[tokens.clamp(max=len(head) - 1)], "d2t": tokens - torch.arange(KEPT)}
    model = copied(eagle3_path(), folder, tensors_of(eagle3_path()) | own)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"draft_vocab_size": KEPT}))
    return model


def told(client: Client) -> tuple[list[tuple[int, ...]], float]:
    """Greedy outputs, and tokens a verify pass."""
    rollouts = client.generate_batch(PROMPTS, GREEDY)
    lengths = [rollout.accept_length for rollout in rollouts if rollout.accept_length]
    return [rollout.tokens for rollout in rollouts], sum(lengths) / len(lengths)


def test_the_map_of_tokens_follows_a_swap(servers: Servers, tmp_path: Path) -> None:
    tokens = torch.arange(KEPT)
    up, down = made(tmp_path / "up", tokens), made(tmp_path / "down", tokens.flip(0))
    astray = made(tmp_path / "astray", tokens + 100)  # the target has 295
    url = servers.get(["--drafter", str(up), "--arm", "3,1,4"])
    trainer = Trainer(url)
    with Client(url) as client:
        outputs, length = told(client)
        assert length > 1.8
        for model in (down, up, down):
            assert trainer.drafter(model).status_code == 200
            assert told(client) == (outputs, pytest.approx(length, abs=0.02))
        refused = trainer.drafter(astray)
        assert refused.status_code == 400
        assert "d2t leads outside" in refused.json()["message"]
        assert trainer.post("/tlt/v1/drafter/rollback").status_code == 200
        assert told(client) == (outputs, pytest.approx(length, abs=0.02))
    trainer.close()
