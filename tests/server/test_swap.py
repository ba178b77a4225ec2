"""Drafter swaps under load: nothing waits, nothing is flushed, no output changes, and there is always a way back."""

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tlt_client import Client, DrafterUpdate, SamplingParams, VersionConflict

from benchmarks.lib.reload.streams import beside
from tests.server.conftest import PROMPTS
from tests.server.trainer import (
    DRAFTERS,
    Tensors,
    Trainer,
    changed,
    copied,
    noisy,
    shuffled,
    tensors_of,
)

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
SWAPS = 20
"""1,000 are made by `python -m benchmarks swap`."""


@pytest.fixture(scope="module", params=DRAFTERS)
def config(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def drafters(config: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded drafter; one as good, that holds wrong tensors of what it shares with the target; one of no use."""
    folder, start = tmp_path_factory.mktemp(config), DRAFTERS[config]
    good = noisy(start, folder / "good", 1, scale=0.005)
    strangers = {"embed_tokens.weight": torch.zeros(295, 256), "lm_head.weight": torch.zeros(295, 256)}
    save_file(tensors_of(good) | strangers, good / "model.safetensors")
    return {"start": start, "good": good, "random": shuffled(start, folder / "random", 2)}


@pytest.fixture(autouse=True)
def observing(trainer: Trainer) -> None:
    """Some drafters here are of no use."""
    trainer.http.put("/tlt/v1/drafter/watchdog", json={"mode": "observe"}).raise_for_status()


def rollouts(trainer: Trainer, **sampling: Any) -> list[dict[str, Any]]:
    body = {"text": PROMPTS, "sampling_params": GREEDY | sampling}
    answers: list[dict[str, Any]] = trainer.http.post("/generate", json=body).raise_for_status().json()
    return answers


def accept_length(trainer: Trainer) -> float:
    told = [each["meta_info"]["spec_accept_length"] for each in rollouts(trainer, max_new_tokens=64)]
    return sum(told) / len(told)


def live(trainer: Trainer) -> dict[str, Any]:
    answer: dict[str, Any] = trainer.http.get("/tlt/v1/drafter").raise_for_status().json()["live"]
    return answer


def under_load(trainer: Trainer, work: Callable[[], None]) -> list[list[dict[str, Any]]]:
    """Rounds of 16 greedy streams, one after another for as long as `work` takes."""
    return beside(lambda: rollouts(trainer), work)


def test_swaps_under_load_change_no_output(trainer: Trainer, drafters: dict[str, Path]) -> None:
    """Good, identical, random; the last is the drafter of the start, which is then as good as ever."""
    trainer.drafter(drafters["start"]).raise_for_status()
    before, undisturbed, length = trainer.checksums(), rollouts(trainer), accept_length(trainer)
    first, choose = live(trainer)["version"], random.Random(5)

    def swaps() -> None:
        for _ in range(SWAPS - 1):
            trainer.drafter(drafters[choose.choice(sorted(drafters))]).raise_for_status()
        trainer.drafter(drafters["start"]).raise_for_status()

    rounds = under_load(trainer, swaps)
    outputs = [each["output_ids"] for each in undisturbed]
    assert all([each["output_ids"] for each in answers] == outputs for answers in rounds)
    assert live(trainer)["version"] == first + SWAPS
    drafted = [each["meta_info"]["drafter_versions"] for answers in rounds for each in answers]
    assert sum(len(spans) for spans in drafted) > len(drafted) + SWAPS / 4  # they did fall into the streams
    assert all([span["end"] for span in spans][-1] == 200 for spans in drafted)
    assert {len(each["meta_info"]["weight_versions"]) for answers in rounds for each in answers} == {1}
    assert max(each["meta_info"]["num_retractions"] for answers in rounds for each in answers) == 0
    assert trainer.checksums() == before
    assert accept_length(trainer) == pytest.approx(length, abs=0.02)


def test_a_swap_changes_the_drafter_alone(trainer: Trainer, drafters: dict[str, Path]) -> None:
    before = trainer.checksums()
    trainer.drafter(drafters["random"]).raise_for_status()
    assert accept_length(trainer) < 1.5
    differs = changed(before, trainer.checksums())
    assert all(name.startswith("draft.") for name in differs)
    assert not any("embed" in name or "lm_head" in name for name in differs)
    assert "draft.model.layers.0.self_attn.qkv_proj.weight" in differs
    assert trainer.post("/tlt/v1/drafter/rollback").status_code == 200
    assert trainer.checksums() == before
    assert trainer.post("/tlt/v1/drafter/rollback").status_code == 409


def test_a_stream_sees_the_swap(trainer: Trainer, drafters: dict[str, Path]) -> None:
    """The target's version is one throughout: a trainer that drops mixed samples keeps this one."""
    version = live(trainer)["version"]
    with Client(str(trainer.http.base_url)) as client:
        chunks = client.stream(PROMPTS[0], SamplingParams(max_new_tokens=400, ignore_eos=True))
        next(chunks)
        told = client.update_drafter(DrafterUpdate(str(drafters["start"]), trained_on=0))
        *_, last = chunks
        assert client.drafter().live.trained_on == 0
    assert told.live.version > version
    assert last.rollout is not None
    assert [span.version for span in last.rollout.drafter_versions] == [version, told.live.version]
    assert len(last.rollout.weight_versions) == 1


def wrong(start: Path, folder: Path) -> dict[str, Callable[[], Path]]:
    """Drafters that a server must refuse, by what is wrong with them."""
    tensors = tensors_of(start)
    name = "layers.0.self_attn.q_proj.weight"

    def with_tensors(kind: str, other: Tensors) -> Path:
        return copied(start, folder / kind, other)

    def with_config(**fields: object) -> Path:
        model = copied(start, folder / "config", tensors)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | fields))
        return model

    def with_bytes(kind: str, change: Callable[[bytes], bytes]) -> Path:
        model = copied(start, folder / kind, tensors)
        file = model / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))
        return model

    def pipe() -> Path:
        os.mkfifo(folder / "model.safetensors")
        return folder / "model.safetensors"

    def vast() -> Path:
        """3 GiB, of which none is on the disk: more than the names and shapes of this drafter can be."""
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(3 << 30)
        return folder / "model.safetensors"

    nan = tensors[name].clone()
    nan[-1, -1] = float("nan")
    return {
        "NaN": lambda: with_tensors("nan", tensors | {name: nan}),
        "its shape is [256, 128]": lambda: with_tensors(
            "narrow", tensors | {name: tensors[name][:, :128].contiguous()}
        ),
        "its shape is [300": lambda: with_tensors("wide", tensors | {name: torch.zeros(300, *tensors[name].shape[1:])}),
        "its dtype is torch.int8": lambda: with_tensors("int8", tensors | {name: tensors[name].to(torch.int8)}),
        "is missing": lambda: with_tensors("missing", {k: v for k, v in tensors.items() if k != name}),
        "has no such weight": lambda: with_tensors("extra", tensors | {"layers.1.norm": torch.ones(2)}),
        "architectures": lambda: with_config(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        "num_attention_heads": lambda: with_config(num_attention_heads=8),
        "cut short": lambda: with_bytes("short", lambda data: data[:-1000]),
        "not a safetensors file": lambda: with_bytes(
            "noise", lambda data: b"\x10" + bytes(7) + b"no JSON at all,." + data
        ),
        "not a regular file": pipe,
        "are the most": vast,
        "it holds 0 safetensors files": lambda: folder,
    }


KINDS = list(wrong(DRAFTERS["eagle-chain"], Path("/")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_drafter_is_refused(trainer: Trainer, config: str, tmp_path: Path, kind: str) -> None:
    before, now = trainer.checksums(), live(trainer)
    answer = trainer.drafter(wrong(DRAFTERS[config], tmp_path)[kind]())
    assert answer.status_code == 400
    assert kind in answer.json()["message"]
    assert (trainer.checksums(), live(trainer)) == (before, now)
    assert trainer.http.get("/tlt/v1/events").json()[-1]["kind"] == "drafter_refused"


def test_a_checksum_that_is_not_its_own(trainer: Trainer, drafters: dict[str, Path]) -> None:
    answer = trainer.drafter(drafters["good"], sha256="0" * 64)
    assert answer.status_code == 400
    assert "its sha256 is" in answer.json()["message"]
    trainer.drafter(drafters["start"]).raise_for_status()
    right = live(trainer)["sha256"]
    assert trainer.drafter(drafters["start"], sha256=right.upper()).status_code == 200


def test_order(trainer: Trainer, drafters: dict[str, Path]) -> None:
    newest = trainer.http.get("/tlt/v1/drafter").json()["newest"]
    with Client(str(trainer.http.base_url)) as client:
        offer = DrafterUpdate(str(drafters["good"]), version=newest + 5)
        assert client.update_drafter(offer) == client.update_drafter(offer)
        with pytest.raises(VersionConflict, match="versions only grow"):
            client.update_drafter(DrafterUpdate(str(drafters["good"]), version=newest + 4))
        assert client.freeze_drafter().frozen
        with pytest.raises(VersionConflict, match="frozen"):
            client.update_drafter(DrafterUpdate(str(drafters["good"])))
        assert client.roll_back_drafter().newest == newest + 5
        assert not client.freeze_drafter(False).frozen
        with pytest.raises(VersionConflict, match="rolled back"):
            client.update_drafter(offer)


def test_two_at_once(trainer: Trainer, drafters: dict[str, Path]) -> None:
    """The newer one is in force at the end, and whoever was overtaken is told; nobody waits for ever."""
    newest = trainer.http.get("/tlt/v1/drafter").json()["newest"]
    offers = [(newest + i, drafters["good" if i % 2 else "start"]) for i in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda offer: trainer.drafter(offer[1], version=offer[0]), offers))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert answers[-1].status_code == 200
    assert live(trainer)["version"] == newest + 8
    assert trainer.http.get("/tlt/v1/drafter").json()["staging"] is None


def test_malformed_requests(trainer: Trainer) -> None:
    for body in (b"", b"{", b"[]", b'{"path": 3}', b'{"path": "/x", "colour": 1}'):
        assert trainer.http.post("/tlt/v1/drafter/update", content=body).status_code == 400, body
    assert trainer.http.post("/tlt/v1/drafter/freeze", content=b'{"frozen": "yes"}').status_code == 400
    assert trainer.http.put("/tlt/v1/drafter/watchdog", content=b'{"mode": "asleep"}').status_code == 400


def test_metrics_follow(trainer: Trainer, drafters: dict[str, Path]) -> None:
    trainer.drafter(drafters["start"], trained_on=0).raise_for_status()
    shown = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(f"{trainer.http.base_url}/metrics").text.splitlines()
        if line[:1] != "#"
    )
    now = trainer.http.get("/tlt/v1/status").json()["versions"]
    assert float(shown["tlt_drafter_version"]) == now["drafter"]["live"]["version"]
    assert float(shown["tlt_drafter_staleness"]) == now["target"]["version"]
    swaps = float(shown['tlt_weight_events_total{kind="drafter_swapped"}'])
    assert float(shown['tlt_drafter_swap_seconds_count{stage="flip"}']) == swaps > 1
