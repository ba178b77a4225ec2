"""The map of tokens of a drafter that knows a part of the target's. EAGLE-3's, d2t, follows a swap: upstream reads it
once at start, and its captured loop holds it. EAGLE's follows what is said, and its rows of the head the target.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tlt_client import Client, SamplingParams
from tokenizers import Tokenizer

from tests.server.conftest import PROMPTS, Servers
from tests.server.trainer import Trainer, copied, tensors_of
from tlt_server.demo import default_paths, eagle3_path

pytestmark = pytest.mark.server

WHOLE, KEPT = 295, 200
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


def renamed(folder: Path) -> tuple[Path, list[int]]:
    """The target with other names for its tokens, but for the special ones, and each one's name."""
    tensors = tensors_of(default_paths()[0])
    names = [0, 1, *(2 + torch.randperm(WHOLE - 2, generator=torch.Generator().manual_seed(0))).tolist()]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].clone().index_copy_(0, torch.tensor(names), tensors[name][:WHOLE])
    return copied(default_paths()[0], folder, tensors), names


def test_a_part_of_the_head_follows_what_is_said_and_the_target(servers: Servers, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_paths()[0] / "tokenizer.json"))
    problems = [each.ids for each in tokenizer.encode_batch(PROMPTS)]
    seeds = [SamplingParams(temperature=1, max_new_tokens=64, sampling_seed=seed) for seed in range(len(problems))]

    def asked(client: Client, names: list[int]) -> tuple[list[list[int]], float]:
        """Outputs in the old names, and tokens a verify pass."""
        rollouts = client.generate_batch([[names[token] for token in prompt] for prompt in problems], GREEDY)
        again = client.generate_batch([[names[token] for token in prompt] for prompt in problems], seeds)
        lengths = [rollout.accept_length for rollout in again if rollout.accept_length]
        old = {new: old for old, new in enumerate(names)}
        return [[old[token] for token in rollout.tokens] for rollout in rollouts], sum(lengths) / len(lengths)

    other, names = renamed(tmp_path / "renamed")
    with Client(servers.get(["--arm", "3,1,4"])) as client:
        outputs, whole = asked(client, list(range(WHOLE)))
    (tmp_path / "part.toml").write_text("draft_vocab = 40\n")
    # for a few steps after the target has other names for all tokens, the drafter has none of them
    flags = ["--arm", "3,1,4", "--watchdog", "observe", "--tlt-config", str(tmp_path / "part.toml")]
    with Client(url := servers.get(flags)) as client, closing(Trainer(url)) as trainer:
        known = [asked(client, list(range(WHOLE))) for _ in range(3)]
        assert [each for each, _ in known] == [outputs] * 3
        assert known[-1][1] > 0.97 * whole
        client.update_weights_from_disk(str(other))
        told = [asked(client, names) for _ in range(3)]
        assert [each for each, _ in told] == [outputs] * 3
        assert told[-1][1] > 0.97 * whole
        sent = tensors_of(default_paths()[1]) | {"lm_head.weight": torch.zeros(WHOLE, 256)}
        assert trainer.drafter(copied(default_paths()[1], tmp_path / "with_head", sent)).status_code == 200
        assert asked(client, names) == (outputs, pytest.approx(told[-1][1], abs=0.05))


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
