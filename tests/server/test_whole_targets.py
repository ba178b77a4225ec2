"""A target of which a part is missing, or is no number, is no success; and the answer says so."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.conftest import PROMPTS
from tests.server.trainer import Tensors, Trainer, buckets, copied, tensors_of
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server("eagle-chain")

TARGET, _ = default_paths()
GONE = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def whole_before_and_after(trainer: Trainer) -> Any:
    """Others may have left a publication that only silence ends; they find none."""
    publish_whole(trainer)
    yield
    publish_whole(trainer)


def publish_whole(trainer: Trainer) -> None:
    trainer.disk(TARGET, weight_version="start").raise_for_status()
    assert "missing" not in target_now(trainer)


def target_now(trainer: Trainer) -> dict[str, Any]:
    now: dict[str, Any] = trainer.http.get("/tlt/v1/status").raise_for_status().json()["versions"]["target"]
    return now


def incomplete_events(trainer: Trainer) -> list[dict[str, Any]]:
    events = trainer.http.get("/tlt/v1/events").raise_for_status().json()
    return [event["detail"] for event in events if event["kind"] == "target_incomplete"]


def without(*names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors_of(TARGET).items() if name not in names}


def by_name(trainer: Trainer, version: str) -> int:
    """The status of a request that needs this version."""
    body = {"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 1}}
    return trainer.http.post("/generate", json=body, headers={"X-TLT-Weight-Version": version}).status_code


def infinite(name: str) -> Tensors:
    tensors = tensors_of(TARGET)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[-1] = float("inf")
    return tensors


def test_a_checkpoint_is_checked_whole_before_a_byte_is_written(trainer: Trainer, tmp_path: Path) -> None:
    before, version = trainer.checksums(), target_now(trainer)
    parts = {"gap": without(GONE), "infinite": infinite(GONE)}
    for kind, tensors in parts.items():
        answer = trainer.disk(copied(TARGET, tmp_path / kind, tensors), weight_version=kind)
        assert (answer.status_code, answer.json()["success"]) == (400, False)
        assert GONE in answer.json()["message"]
        assert "No weight was changed" in answer.json()["message"]
    assert trainer.checksums() == before
    assert target_now(trainer) == version
    trainer.post("/begin_weight_update", allow_partial=True).raise_for_status()
    trainer.disk(tmp_path / "gap").raise_for_status()
    trainer.post("/end_weight_update").raise_for_status()
    assert "missing" not in target_now(trainer)


@pytest.mark.parametrize("route", ["tensor", "bucket", "distributed"])
def test_what_is_not_finite_is_refused_bit_for_bit(trainer: Trainer, route: str) -> None:
    before = trainer.checksums()
    answer = getattr(trainer, route)(infinite(GONE))
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert f"NaN or infinity in {GONE}. No weight was changed" in answer.json()["message"]
    assert trainer.checksums() == before


@pytest.mark.parametrize("ends", ["/end_weight_update", "/continue_generation"])
def test_the_end_of_a_publication_says_what_it_lacks(trainer: Trainer, ends: str) -> None:
    def publish(parts: list[Tensors], version: str) -> Any:
        if ends == "/end_weight_update":
            trainer.post("/begin_weight_update").raise_for_status()
        else:
            trainer.post("/pause_generation", mode="in_place").raise_for_status()
        for part in parts:
            trainer.tensor(part, flush_cache=False, weight_version=version).raise_for_status()
        return trainer.post(ends)

    answer = publish(buckets(without(GONE, "model.norm.weight"), 2), "torso")
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert GONE in answer.json()["message"]
    assert "model.norm.weight" in answer.json()["message"]
    assert set(target_now(trainer)["missing"]) == {GONE, "model.norm.weight"}
    assert incomplete_events(trainer)[-1]["missing"] == 2
    assert 'tlt_weight_events_total{kind="target_incomplete"}' in trainer.http.get("/metrics").text
    assert by_name(trainer, "torso") == 409
    body = {"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 1}}
    assert trainer.http.post("/generate", json=body).status_code == 200  # generation went on, for who names none
    assert publish(buckets(tensors_of(TARGET), 2), "whole").status_code == 200
    assert by_name(trainer, "whole") == 200


@pytest.mark.parametrize("config", ["eagle-chain", "two-ranks"])
def test_merged_tensors_count_for_their_parts(trainer: Trainer, config: str) -> None:
    """As trainers send them that hold them so; of one that is not there, the parts are missing."""
    ranks = 2 if config == "two-ranks" else 1
    tensors, merged = without(), dict[str, torch.Tensor]()
    for layer in range(4):
        for whole, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            prefix = f"model.layers.{layer}.{whole.partition('.')[0]}"
            names = [f"{prefix}.{part}_proj.weight" for part in parts]
            merged[f"model.layers.{layer}.{whole}.weight"] = torch.cat([tensors.pop(name) for name in names])
    before = trainer.checksums()
    trainer.post("/begin_weight_update").raise_for_status()
    for part in (tensors, merged):
        trainer.tensor([part] * ranks, flush_cache=False).raise_for_status()
    assert trainer.post("/end_weight_update").status_code == 200
    assert trainer.checksums() == before
    del merged["model.layers.1.self_attn.qkv_proj.weight"]
    trainer.post("/begin_weight_update").raise_for_status()
    trainer.tensor([tensors | merged] * ranks, flush_cache=False).raise_for_status()
    answer = trainer.post("/end_weight_update")
    assert answer.status_code == 400
    assert all(f"model.layers.1.self_attn.{part}_proj" in answer.json()["message"] for part in "qkv")


def test_a_lone_call_ends_by_silence_or_by_its_flush(trainer: Trainer) -> None:
    part = {"model.norm.weight": tensors_of(TARGET)["model.norm.weight"]}
    answer = trainer.tensor(part)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert "the target is incomplete" in answer.json()["message"]
    seen = len(incomplete_events(trainer))
    trainer.tensor(part, flush_cache=False).raise_for_status()
    assert len(incomplete_events(trainer)) == seen
    time.sleep(2.1)
    assert len(incomplete_events(trainer)) == seen + 1
