"""Memory that is released and resumed: both models come back as they were, and who calls out of turn is told so.

No memory is given back on a CPU. What happens to it on a GPU, benchmarks/memory.py shows.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import PROMPTS
from tests.server.trainer import DRAFTERS, Trainer, noisy, while_running
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server("eagle-chain")

TARGET, _ = default_paths()


@pytest.fixture(autouse=True)
def returned(trainer: Trainer) -> Iterator[None]:
    """All memory is back when a test is over."""
    yield
    trainer.post("/resume_memory_occupation").raise_for_status()


def outputs(trainer: Trainer, length: int = 48) -> list[Any]:
    asked = {"text": PROMPTS[:4], "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}}
    answers = trainer.http.post("/generate", json=asked).raise_for_status().json()
    return [(each["output_ids"], each["meta_info"]["spec_accept_length"]) for each in answers]


def test_a_step_of_a_colocated_trainer(trainer: Trainer, tmp_path: Path) -> None:
    """Release all, resume weights, send the target, resume the cache; each call twice, as one that was retried."""

    def call(route: str, **fields: Any) -> None:
        for _ in range(2):
            answer = trainer.post(route, **fields)
            assert (answer.status_code, answer.json()) == (200, None), answer.text

    assert trainer.disk(TARGET).status_code == 200  # other tests may have left another one
    first = trainer.checksums()
    trainer.drafter(noisy(DRAFTERS["eagle-chain"], tmp_path / "noisy", 3, scale=0.005)).raise_for_status()
    before, told, events = trainer.checksums(), outputs(trainer), trainer.http.get("/tlt/v1/events").json()
    call("/release_memory_occupation", tags=["kv_cache", "kv_cache"])
    call("/release_memory_occupation")
    for answer in (trainer.drafter(DRAFTERS["eagle-chain"]), trainer.post("/tlt/v1/drafter/rollback")):
        assert answer.status_code == 409
        assert "/resume_memory_occupation" in answer.json()["message"]
    assert "/resume_memory_occupation" in trainer.disk(TARGET).json()["message"]
    call("/resume_memory_occupation", tags=["weights"])
    assert trainer.disk(TARGET).status_code == 200
    call("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    assert (trainer.checksums(), outputs(trainer)) == (before, told)
    new = trainer.http.get(f"/tlt/v1/events?after={events[-1]['number']}").json()
    assert [(event["kind"], event["detail"]["tags"]) for event in new if event["kind"].startswith("memory")] == [
        ("memory_released", "kv_cache"),
        ("memory_released", "weights cuda_graph"),
        ("memory_resumed", "weights"),
        ("memory_resumed", "kv_cache cuda_graph"),
    ]
    assert trainer.post("/tlt/v1/drafter/rollback").status_code == 200
    assert trainer.checksums() == first
    trainer.drafter(
        DRAFTERS["eagle-chain"]
    ).raise_for_status()  # the newest version is in force for the tests that follow


def test_a_release_under_load_is_refused(trainer: Trainer) -> None:
    """It would end upstream's server."""
    undisturbed, refused = outputs(trainer, 200), threading.Event()

    def release() -> None:
        for _ in range(1000):
            answer = trainer.post("/release_memory_occupation")
            if answer.status_code == 409:
                assert "requests are running" in answer.json()["message"]
                refused.set()
                return
            trainer.post("/resume_memory_occupation").raise_for_status()  # it fell between two requests
        pytest.fail("no release fell into a request")

    def rounds() -> list[list[Any]]:
        given = [outputs(trainer, 200)]
        while not refused.is_set() and len(given) < 8:
            given.append(outputs(trainer, 200))
        return given

    assert all(given == undisturbed for given in while_running(rounds, release))


@pytest.mark.parametrize("impatient", [False, True])
def test_a_request_waits_until_all_is_back(trainer: Trainer, impatient: bool) -> None:
    """It would end a server whose memory is another's."""
    undisturbed, back = outputs(trainer), threading.Event()

    def lend() -> None:
        time.sleep(0.5)
        trainer.post("/resume_memory_occupation", tags=["kv_cache"]).raise_for_status()
        if impatient:
            trainer.post("/continue_generation").raise_for_status()
        time.sleep(0.5)
        back.set()
        trainer.post("/resume_memory_occupation").raise_for_status()

    def ask() -> list[Any]:
        given = outputs(trainer)
        assert back.is_set()
        return given

    trainer.post("/release_memory_occupation").raise_for_status()
    assert while_running(ask, lend) == undisturbed


def test_what_is_no_tag(trainer: Trainer) -> None:
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        answer = trainer.post(route, tags=["weights", "wights"])
        assert (answer.status_code, "'wights'" in answer.json()["message"]) == (400, True)


def test_upstreams_own_messages(trainer: Trainer) -> None:
    """As who holds the engine in process sends them, and GET: they come out of turn as safely."""
    for route in ("/resume", "/release", "/release", "/resume", "/resume"):
        assert trainer.http.request("GET", f"{route}_memory_occupation", json={}).status_code == 200
    kinds = [event["kind"] for event in trainer.http.get("/tlt/v1/events").json()]
    assert kinds[-2:] == ["memory_released", "memory_resumed"]
