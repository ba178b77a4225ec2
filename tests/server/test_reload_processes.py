"""Hot reload where a server is several processes: every rank changes, or none; every replica answers for itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tlt_client import Client, SamplingParams

from tests.server.conftest import EAGLE3, PROMPTS, Servers, greedy
from tests.server.trainer import Trainer, changed, noisy, tensors_of
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server

TARGET, _ = default_paths()
GREEDY = SamplingParams(temperature=0, max_new_tokens=32)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(TARGET, tmp_path_factory.mktemp("targets") / "moved", seed=7)


@pytest.fixture(scope="module")
def two_ranks(servers: Servers) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        trainer = Trainer(servers.get([*EAGLE3, "--tp-size", "2"]))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def two_replicas(servers: Servers) -> Iterator[Trainer]:
    trainer = Trainer(servers.get(["--dp-size", "2", "--tokenizer-worker-num", "2"]))
    yield trainer
    trainer.close()


def test_a_rank_that_gets_other_tensors_keeps_all_from_writing(two_ranks: Trainer) -> None:
    """Each rank has a payload of its own; only one of them is wrong, and only that rank can know."""
    before = two_ranks.checksums()
    good = tensors_of(TARGET)
    good["model.norm.weight"] = good["model.norm.weight"] * 2
    bad = good | {"lm_head.weight": torch.zeros(7, 7)}
    for payloads in ([good, bad], [bad, good]):
        answer = two_ranks.tensor(payloads)
        assert answer.status_code == 400
        assert "lm_head.weight: its shape is [7, 7]" in answer.json()["message"]
        assert two_ranks.checksums() == before
    broken = two_ranks.post("/update_weights_from_tensor", serialized_named_tensors=["bm90IGEgcGlja2xl"])
    assert broken.status_code == 400
    assert two_ranks.tensor([good, good]).status_code == 200
    assert changed(before, two_ranks.checksums()) == {"model.norm.weight"}
    assert two_ranks.disk(TARGET).status_code == 200
    assert two_ranks.checksums() == before


def test_ranks_follow_the_target_together(two_ranks: Trainer, moved: Path) -> None:
    assert two_ranks.disk(moved, weight_version="moved").status_code == 200
    after = Reference(moved)
    with Client(str(two_ranks.http.base_url)) as client:
        rollouts = client.generate_batch(PROMPTS[:6], GREEDY)
    assert [rollout.tokens for rollout in rollouts] == [greedy(after, prompt, 32) for prompt in PROMPTS[:6]]
    assert {rollout.weight_versions[0].version for rollout in rollouts} == {"moved"}
    assert two_ranks.disk(TARGET).status_code == 200


def test_replicas_and_tokenizer_workers_know_the_version(two_replicas: Trainer, moved: Path) -> None:
    """Whichever process answers."""

    def post(route: str, **fields: Any) -> None:
        answer = two_replicas.post(route, **fields)
        assert answer.status_code == 200, answer.text

    post("/pause_generation", mode="in_place")
    post("/begin_weight_update")
    assert two_replicas.disk(moved, weight_version="moved").status_code == 200
    post("/end_weight_update")
    post("/continue_generation")
    with Client(str(two_replicas.http.base_url)) as client:
        rollouts = client.generate_batch(PROMPTS, GREEDY)
    spans = {(span.version, span.target_version) for rollout in rollouts for span in rollout.weight_versions}
    assert spans == {("moved", 1)}
    events = two_replicas.http.get("/tlt/v1/events").json()
    assert sorted((event["kind"], event["replica"]) for event in events) == [
        ("target_published", 0),
        ("target_published", 1),
    ]
