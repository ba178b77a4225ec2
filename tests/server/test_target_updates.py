"""Target updates by every route: the target changes, alone, whole or not at all, whatever runs meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tlt_client import Client, SamplingParams

from tests.server.conftest import PROMPTS, greedy
from tests.server.trainer import DRAFTERS, Tensors, Trainer, changed, noisy, tensors_of, until_under_way, while_running
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server

TARGET, _ = default_paths()
GREEDY = SamplingParams(temperature=0, max_new_tokens=32)
ROUTES = ("disk", "tensor", "bucket", "distributed")
# What the drafter shares with the target; upstream's checksums list it under the drafter too.
SHARED = {"draft.model.embed_tokens.weight", "draft.lm_head.weight"}


@pytest.fixture(scope="session")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another target of the same shape."""
    return noisy(TARGET, tmp_path_factory.mktemp("targets") / "moved", seed=5)


@pytest.fixture(scope="session")
def expected_after(moved: Path, reference: Reference) -> list[Tokens]:
    after = Reference(moved)
    return [greedy(after, prompt, 32) for prompt in PROMPTS]


@pytest.fixture(params=DRAFTERS)
def config(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def send(trainer: Trainer, route: str, model: Path, **fields: object) -> None:
    what = model if route == "disk" else tensors_of(model)
    answer = getattr(trainer, route)(what, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_target_update_changes_the_target_alone(
    trainer: Trainer, url: str, route: str, moved: Path, expected_after: list[Tokens]
) -> None:
    send(trainer, route, TARGET)  # other tests may have left another one
    before = trainer.checksums()
    send(trainer, route, moved)
    differs = changed(before, trainer.checksums())
    assert {name for name in differs if name.startswith("draft.")} == SHARED
    assert len(differs - SHARED) == 2 + 4 * 4  # embedding, head, and the matrices of four layers
    with Client(url) as client:
        rollouts = client.generate_batch(PROMPTS, GREEDY)
    assert [rollout.tokens for rollout in rollouts] == expected_after
    accepted = [rollout.accept_length for rollout in rollouts if rollout.accept_length]
    assert sum(accepted) / len(accepted) > 2  # a drafter with the target's tensors in it has 1.0
    send(trainer, route, TARGET)
    assert trainer.checksums() == before


def test_a_selector_is_honoured(trainer: Trainer, moved: Path) -> None:
    before = trainer.checksums()
    for fields in ({"selector": "draft"}, {"selector": "everything"}):
        answer = trainer.disk(moved, **fields)
        assert answer.status_code == 400
        assert fields["selector"] in answer.json()["message"]
        assert trainer.checksums() == before
    for fields in ({"selector": "target"}, {"selector": "all"}, {"disable_draft_model": False}):
        send(trainer, "tensor", moved, **fields)
        differs = changed(before, trainer.checksums())
        assert differs
        assert "draft.model.layers.0.self_attn.qkv_proj.weight" not in differs
        send(trainer, "tensor", TARGET, **fields)


def misfits() -> dict[str, Tensors]:
    """Updates of which one tensor does not fit, the last one, so that a loader would have written all before it."""
    good = tensors_of(TARGET)
    name = "model.layers.3.self_attn.q_proj.weight"
    wrong = {
        "too large": torch.zeros(260, 256),
        "too small": torch.zeros(128, 256),
        "transposed": torch.zeros(16, 4096),
        "integers": torch.zeros(256, 256, dtype=torch.int64),
    }
    cases = {kind: {**good, name: tensor} for kind, tensor in wrong.items()}
    return cases | {
        "unknown": good | {"model.layers.4.mlp.up_proj.weight": torch.zeros(768, 256)},
        "the drafter's": tensors_of(DRAFTERS["eagle-chain"]),
    }


FLAT = [kind for kind in misfits() if kind != "integers"]  # a flat bucket has one dtype
SENT = [(route, kind) for route in ("tensor", "distributed") for kind in misfits()] + [("bucket", k) for k in FLAT]


@pytest.mark.parametrize(("route", "kind"), SENT)
def test_what_does_not_fit_is_refused_bit_for_bit(trainer: Trainer, route: str, kind: str) -> None:
    before = trainer.checksums()
    answer = getattr(trainer, route)(misfits()[kind])
    assert answer.status_code == 400
    message = answer.json()["message"]
    assert "No weight was changed" in message
    assert any(name in message for name in ("layers.3.self_attn.q_proj", "layers.4.mlp.up_proj", "fc.weight")), message
    assert trainer.checksums() == before


def test_a_direct_load_is_checked_too(trainer: Trainer) -> None:
    """It writes parameters by their own names, and goes around the loader that is guarded."""
    before = trainer.checksums()
    good = {"model.norm.weight": torch.ones(256)}
    for bad in ({"model.layers.0.self_attn.q_proj.weight": torch.zeros(256, 256)}, {"lm_head.weight": torch.ones(9)}):
        answer = trainer.tensor(good | bad, load_format="direct")
        assert answer.status_code == 400
        assert next(iter(bad)) in answer.json()["message"]
        assert trainer.checksums() == before
    assert trainer.tensor(good, load_format="direct").status_code == 200
    assert changed(before, trainer.checksums()) == {"model.norm.weight"}
    send(trainer, "disk", TARGET)


def damaged(folder: Path, kind: str) -> Path:
    model = noisy(TARGET, folder / kind, seed=9)
    file = model / "model.safetensors"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "not safetensors":
        file.write_bytes(b"\x00" * 5000)
    elif kind == "no weights":
        file.unlink()
    elif kind == "no folder":
        return folder / "nowhere"
    return model


@pytest.mark.parametrize("kind", ["truncated", "not safetensors", "no weights", "no folder"])
def test_a_damaged_checkpoint_is_refused(trainer: Trainer, tmp_path: Path, kind: str) -> None:
    before, path = trainer.checksums(), trainer.http.get("/model_info").json()["model_path"]
    answer = trainer.disk(damaged(tmp_path, kind), weight_version="broken")
    assert answer.status_code == 400
    assert answer.json()["message"]
    assert trainer.checksums() == before
    info = trainer.http.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) != (path, "broken")
    assert info["model_path"] == path


def test_what_would_end_the_server_is_answered(trainer: Trainer, url: str) -> None:
    group = {"master_address": "127.0.0.1", "master_port": "1", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    refused = [
        trainer.post("/init_weights_update_group", **group, group_name=""),
        trainer.post("/update_weights_from_distributed", names=[], dtypes=[], shapes=[], group_name="nobody's"),
        trainer.post("/update_weights_from_tensor", serialized_named_tensors=["bm90IGEgcGlja2xl"]),
        trainer.post("/update_weights_from_ipc", zmq_handles={}),
        trainer.tensor(tensors_of(TARGET), load_format="nonsense"),
    ]
    assert [answer.status_code for answer in refused] == [400] * 5
    assert all(answer.json()["message"] for answer in refused)
    with Client(url) as client:
        assert client.generate(PROMPTS[0], GREEDY).completion_tokens


@pytest.mark.parametrize(("config", "mode"), [("eagle-chain", "in_place"), ("eagle3-tree", "retract")])
def test_a_flush_with_requests_running(trainer: Trainer, url: str, mode: str) -> None:
    """They are retracted, the cache is emptied, they go on; and every one says what it would have said."""
    sampling = {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True}
    body = {"text": PROMPTS, "sampling_params": sampling}

    def rollouts() -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = trainer.http.post("/generate", json=body).raise_for_status().json()
        return answers

    def updates() -> None:
        for _ in range(3):
            until_under_way(trainer, len(PROMPTS))
            trainer.post("/pause_generation", mode=mode).raise_for_status()
            send(trainer, "disk", TARGET)  # flush_cache is true where nothing is said
            trainer.post("/continue_generation").raise_for_status()

    undisturbed, disturbed = rollouts(), while_running(rollouts, updates)
    assert [each["output_ids"] for each in disturbed] == [each["output_ids"] for each in undisturbed]
    assert max(each["meta_info"]["num_retractions"] for each in disturbed) > 1
    with Client(url) as client:
        assert client.generate(PROMPTS[0], GREEDY).cached_tokens > 0
        send(trainer, "disk", TARGET)
        assert client.generate(PROMPTS[0], GREEDY).cached_tokens == 0
