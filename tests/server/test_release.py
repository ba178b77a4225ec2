"""Memory that is released and resumed: both models come back as they were, and who calls out of turn is told so.

No memory is given back on a CPU. What happens to it on a GPU, benchmarks/commands/reload/memory.py shows.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.lib.safety.offload import orders, run_all
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


def test_orders(url: str, trainer: Trainer, tmp_path: Path) -> None:
    """Those of slime, Miles, verl and NeMo-RL, some that make no sense, and some that are drawn."""
    targets = (TARGET, noisy(TARGET, tmp_path / "other", 5, scale=0.2))
    tried = tuple(orders(24, Random(5)))[::3]
    for order, session in zip(tried, run_all(url, targets, tried), strict=True):
        assert (session.hung, session.wrong, session.odd) == ([], [], []), order


def test_an_update_goes_past_requests_that_wait(trainer: Trainer) -> None:
    """Its lock waits for all requests, which wait for the memory, which waits for the update."""
    undisturbed = outputs(trainer)

    def publish() -> None:
        time.sleep(0.5)
        trainer.post("/resume_memory_occupation", tags=["weights"]).raise_for_status()
        assert trainer.disk(TARGET, flush_cache=False).status_code == 200
        assert trainer.post("/weights_checker", action="checksum").status_code == 200
        trainer.post("/resume_memory_occupation", tags=["kv_cache"]).raise_for_status()

    trainer.post("/release_memory_occupation").raise_for_status()
    for route, fields in (
        ("/weights_checker", {"action": "checksum"}),
        ("/get_weights_by_name", {"name": "model.norm.weight"}),
    ):
        assert trainer.post(route, **fields).status_code == 400
    assert while_running(lambda: outputs(trainer), publish) == undisturbed


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_outlasts_what_is_lent(trainer: Trainer, mode: str) -> None:
    """Whatever came first; and what runs in place goes on where it was."""
    undisturbed = outputs(trainer, 200)

    def held() -> None:
        time.sleep(0.1)
        for first, second in (("pause", "release"), ("release", "pause")):
            for step in (first, second):
                route = "/pause_generation" if step == "pause" else "/release_memory_occupation"
                trainer.post(route, **({"mode": mode} if step == "pause" else {})).raise_for_status()
            trainer.post("/resume_memory_occupation").raise_for_status()
            for route in ("/health", "/health_generate", "/flush_cache"):
                assert trainer.http.get(route).status_code == 200
            assert not done.is_set()
        trainer.post("/continue_generation").raise_for_status()

    done = threading.Event()

    def ask() -> list[Any]:
        given = outputs(trainer, 200)
        done.set()
        return given

    given = while_running(ask, held)
    assert [tokens for tokens, _ in given] == [tokens for tokens, _ in undisturbed]
