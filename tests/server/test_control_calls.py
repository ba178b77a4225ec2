"""Control calls at once, and calls whose callers have gone: each is made, each answer is its own."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tests.server.conftest import PROMPTS
from tests.server.trainer import Trainer, noisy, tensors_of
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server

TARGET, _ = default_paths()


def dropped(url: str, route: str, **fields: Any) -> None:
    """Sends a request, and is gone before it is answered."""
    where, body = urlsplit(url), msgspec.json.encode(fields)
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(head.encode() + body)


def at_once(*calls: Callable[[], httpx.Response]) -> list[int]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [answer.result().status_code for answer in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("config", ["eagle-chain", "two-replicas"])
def test_calls_at_once_are_each_answered(trainer: Trainer, url: str, config: str, tmp_path: Path) -> None:
    name = trainer.http.get("/v1/models").json()["data"][0]["id"]
    moved = noisy(TARGET, tmp_path / "moved", seed=4)
    pause, resume = {"mode": "in_place"}, {}
    for paused in (True, False):
        if paused:
            trainer.post("/pause_generation", **pause).raise_for_status()
        updates = [lambda model=model: trainer.disk(model) for model in (moved, TARGET) * 3]
        others = [lambda: trainer.post("/flush_cache"), lambda: trainer.post("/weights_checker", action="checksum")]
        assert set(at_once(*updates, *others)) == {200}
        for _ in range(4):
            dropped(url, "/update_weights_from_disk", model_path=str(TARGET))  # it may come after all others
            dropped(url, "/weights_checker", action="checksum")
            dropped(url, "/tlt/v1/target/share", path=str(tmp_path / "nobody"))
        refused = trainer.disk(tmp_path / "nowhere")
        assert refused.status_code == 400  # not the answer to one of those before
        assert trainer.disk(TARGET, weight_version="last").status_code == 200
        assert "ranks" in trainer.post("/weights_checker", action="checksum").json()
        if paused:
            toggles = [lambda: trainer.post("/continue_generation", **resume)] * 3
            assert set(at_once(*toggles, *[lambda: trainer.post("/pause_generation", **pause)] * 3)) == {200}
            trainer.post("/continue_generation").raise_for_status()
    body = {"text": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    assert trainer.http.post("/generate", json=body).status_code == 200
    assert trainer.http.get("/get_weight_version").json() == {"weight_version": "last"}
    assert trainer.http.get("/v1/models").json()["data"][0]["id"] == name


@pytest.mark.server("eagle-chain")
def test_lent_memory_and_updates_at_once(trainer: Trainer) -> None:
    """Some are refused in a line; the server stays, and all of it comes back."""
    tensors = tensors_of(TARGET)
    calls = [
        lambda: trainer.disk(TARGET),
        lambda: trainer.post("/release_memory_occupation"),
        lambda: trainer.tensor(tensors),
        lambda: trainer.post("/resume_memory_occupation"),
    ]
    for _ in range(3):
        assert set(at_once(*calls)) <= {200, 400, 409}
        trainer.post("/resume_memory_occupation").raise_for_status()
    trainer.disk(TARGET).raise_for_status()
