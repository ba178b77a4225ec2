"""Hot reload where a server is several processes: every rank changes, or none; every replica answers for itself."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tlt_client import Client, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm

from tests.server.conftest import PROMPTS, greedy
from tests.server.trainer import Trainer, changed, copied, noisy, shuffled, tensors_of, until_under_way, while_running
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server("two-ranks")

TARGET, _ = default_paths()
GREEDY = SamplingParams(temperature=0, max_new_tokens=32)
# Upstream looks for the limit before it looks for the end: where both fall into one verify pass, what follows the end
# of the sequence is returned too, so that the output depends on the drafter.
ENDLESS = SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(TARGET, tmp_path_factory.mktemp("targets") / "moved", seed=7)


@pytest.fixture
def two_ranks(trainer: Trainer, client: Client) -> Trainer:
    client.set_strategy(StrategyUpdate("pinned", pinned=Arm(3, 1, 4)))
    return trainer


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


def test_ranks_swap_the_drafter_together(two_ranks: Trainer, tmp_path: Path) -> None:
    """Swaps while they decode; a NaN in the shard of one of them keeps both from swapping."""
    start = eagle3_path()
    good, useless = noisy(start, tmp_path / "good", 1, scale=0.005), shuffled(start, tmp_path / "useless", 2)
    before = two_ranks.checksums()
    two_ranks.http.put("/tlt/v1/drafter/watchdog", json={"mode": "observe"}).raise_for_status()
    with Client(str(two_ranks.http.base_url)) as client:
        expected = [rollout.tokens for rollout in client.generate_batch(PROMPTS, ENDLESS)]

        def swaps() -> None:
            for drafter in [good, useless, start] * 4:
                two_ranks.drafter(drafter).raise_for_status()

        rounds = while_running(lambda: [client.generate_batch(PROMPTS, ENDLESS) for _ in range(3)], swaps)
    assert all([rollout.tokens for rollout in given] == expected for given in rounds)
    assert two_ranks.checksums() == before
    tensors = tensors_of(start)
    for row in (0, -1):  # of the first rank's shard, and of the last one's
        bad = tensors["layers.0.self_attn.q_proj.weight"].clone()
        bad[row] = float("nan")
        model = copied(start, tmp_path / f"nan{row}", tensors | {"layers.0.self_attn.q_proj.weight": bad})
        answer = two_ranks.drafter(model)
        assert answer.status_code == 400
        assert "holds NaN" in answer.json()["message"]
        assert two_ranks.checksums() == before
    two_ranks.drafter(useless).raise_for_status()
    assert {name for name in changed(before, two_ranks.checksums()) if not name.startswith("draft.")} == set()
    assert two_ranks.post("/tlt/v1/drafter/rollback").status_code == 200
    assert two_ranks.checksums() == before


@pytest.mark.parametrize("config", ["two-ranks", "two-replicas"])
def test_what_drafters_need_of_the_target_is_shared_whole(config: str, client: Client, tmp_path: Path) -> None:
    """Of ranks, each of which holds some of its rows, and of replicas, of which one gives it."""
    sent = tensors_of(TARGET)
    shared = client.share_target(str(tmp_path / "shared"))
    held = {name: each for file in Path(shared.path).iterdir() for name, each in load_file(file).items()}
    assert held.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    for name, tensor in held.items():
        assert torch.equal(tensor, sent[name].to(tensor.dtype)), name


def test_ranks_lend_their_memory_together(two_ranks: Trainer) -> None:
    before = two_ranks.checksums()
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert two_ranks.post(route).status_code == 200
    assert two_ranks.checksums() == before
    with Client(str(two_ranks.http.base_url)) as client:
        assert client.generate(PROMPTS[0], GREEDY).completion_tokens > 0
    kinds = [event["kind"] for event in two_ranks.http.get("/tlt/v1/events").json()]
    assert kinds[-2:] == ["memory_released", "memory_resumed"]


@pytest.mark.server("two-replicas")
def test_all_replicas_lend_or_none(trainer: Trainer) -> None:
    """One of them is busy: the other serves as before."""
    long = {"text": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}}
    before = trainer.http.get("/tlt/v1/events").json()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(trainer.http.post, "/generate", json=long)
        until_under_way(trainer)
        assert trainer.post("/release_memory_occupation", tags=["weights"]).status_code == 409
        assert trainer.post("/release_memory_occupation", tags=["wights"]).status_code == 400
        with Client(str(trainer.http.base_url)) as client:
            assert len(client.generate_batch(PROMPTS[:4], GREEDY)) == 4
        assert busy.result().status_code == 200
    assert trainer.http.get("/tlt/v1/events").json() == before
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert trainer.post(route).status_code == 200
    assert trainer.post("/generate", **long).status_code == 200


def test_ranks_come_to_one_verdict(two_ranks: Trainer, tmp_path: Path) -> None:
    """Each judges the drafter by itself; were they a step apart, they would draft differently, and the server end."""
    two_ranks.drafter(eagle3_path()).raise_for_status()
    two_ranks.http.put("/tlt/v1/drafter/watchdog", json={"mode": "armed"}).raise_for_status()
    before, long = two_ranks.checksums(), SamplingParams(temperature=1, max_new_tokens=160, ignore_eos=True)
    with Client(str(two_ranks.http.base_url)) as client:
        for _ in range(2):
            client.generate_batch(PROMPTS, long)
        seen = client.events()[-1].number
        two_ranks.drafter(shuffled(eagle3_path(), tmp_path / "useless", 3)).raise_for_status()
        client.generate_batch(PROMPTS, long)
        kinds = [event.kind for event in client.events(seen)]
    assert kinds == ["drafter_swapped", "accept_length_collapsed", "drafter_rolled_back"]
    assert two_ranks.checksums() == before


@pytest.mark.server("two-replicas")
def test_replicas_and_tokenizer_workers_know_the_version(trainer: Trainer, moved: Path) -> None:
    """Whichever process answers."""

    def post(route: str, **fields: Any) -> None:
        answer = trainer.post(route, **fields)
        assert answer.status_code == 200, answer.text

    before = trainer.http.get("/tlt/v1/events").json()  # others have used this server
    post("/pause_generation", mode="in_place")
    post("/begin_weight_update")
    assert trainer.disk(moved, weight_version="moved").status_code == 200
    post("/end_weight_update")
    post("/continue_generation")
    with Client(str(trainer.http.base_url)) as client:
        rollouts = client.generate_batch(PROMPTS, GREEDY)
    spans = {(span.version, span.target_version) for rollout in rollouts for span in rollout.weight_versions}
    ((name, target),) = spans
    for _ in range(4):  # whichever tokenizer worker leads it through
        assert trainer.drafter(default_paths()[1]).status_code == 200
    events = [event for event in trainer.http.get("/tlt/v1/events").json() if event not in before]
    swaps = [(event["replica"], event["detail"]["version"]) for event in events if event["kind"] == "drafter_swapped"]
    first = swaps[0][1]
    assert sorted(swaps) == [(replica, first + count) for replica in (0, 1) for count in range(4)]
    events = [event for event in events if event["kind"] == "target_published"]
    assert (name, {event["detail"]["version"] for event in events}) == ("moved", {target})
    assert sorted(event["replica"] for event in events) == [0, 1]
