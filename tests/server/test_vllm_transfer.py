"""vLLM's weight transfer and control routes, by a trainer's own calls: whole, refused, torn, abandoned, repeated."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import Tensors, changed, noisy, tensors_of
from tests.server.trainer import while_running
from tests.server.vllm_stand_in.vllm.distributed.weight_transfer.nccl_common import trainer_init
from tests.server.vllm_stand_in.vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from tlt_server.demo import default_paths
from tlt_server.process import free_port

TARGET, _ = default_paths()
CHUNK = 500_000
"""Bytes: the target comes in several."""


class Vllm(Trainer):
    """A trainer that speaks vLLM's dialect; `sender` is its end of the transfer."""

    sender: Any = None

    def init(self, **fields: Any) -> httpx.Response:
        """Opens the group while the server joins it."""
        world = 1 + int(self.http.get("/get_world_size").json()["world_size"])
        place = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": world}
        info = place | {"packed": True, "packed_buffer_size_bytes": CHUNK} | fields

        def lead() -> None:
            self.sender = trainer_init(info)

        answer: httpx.Response = while_running(lambda: self.post("/init_weight_transfer_engine", init_info=info), lead)
        return answer

    def send(self, tensors: Tensors, *, told: Tensors | None = None, only: int | None = None, **fields: Any) -> Any:
        """One update call. told: what the server hears, where that is not what comes. only: so many tensors come."""
        told = tensors if told is None else told
        info = {
            "names": list(told),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in told.values()],
            "shapes": [list(each.shape) for each in told.values()],
        }
        size = CHUNK if fields.get("packed", True) else 0

        def broadcast() -> None:
            for_each = list(tensors.values())[:only]
            packed_nccl_broadcast_producer(iter(for_each), self.sender, 0, lambda tensor: tensor, size)

        return while_running(lambda: self.post("/update_weights", update_info=info | fields), broadcast)

    def publish(self, tensors: Tensors, **fields: Any) -> list[int]:
        """The statuses of a whole update."""
        calls = (
            lambda: self.post("/start_weight_update"),
            lambda: self.send(tensors, **fields),
            lambda: self.post("/finish_weight_update"),
        )
        return [call().status_code for call in calls]

    def target(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/tlt/v1/status").json()["versions"]["target"]
        return found

    def says(self) -> str:
        answer = self.post("/generate", text="12*3", sampling_params={"temperature": 0, "max_new_tokens": 8})
        return str(answer.raise_for_status().json()["text"])


@pytest.fixture
def vllm(url: str) -> Iterator[Vllm]:
    """With weights of its own in place again afterwards."""
    trainer = Vllm(url)
    yield trainer
    assert trainer.init().status_code == 200
    assert trainer.publish(tensors_of(TARGET)) == [200, 200, 200]
    assert trainer.post("/resume").status_code == 200
    assert trainer.http.get("/is_paused").json() == {"is_paused": False}
    trainer.http.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(TARGET, tmp_path_factory.mktemp("other") / "target", 5)


def floats(tensors: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in tensors.items()}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.server("vllm")
def test_a_whole_target_arrives(vllm: Vllm, other: Path, packed: bool) -> None:
    start, before = vllm.checksums(), vllm.target()["version"]
    assert vllm.init().json() == {"message": "Weight transfer initialized"}
    assert vllm.publish(floats(tensors_of(other)), packed=packed) == [200, 200, 200]
    arrived = vllm.checksums()
    assert changed(start, arrived)
    vllm.disk(other).raise_for_status()
    assert vllm.checksums() == arrived, "what was sent is what the same checkpoint on disk would be"
    target = vllm.target()
    assert target["version"] == before + 2
    assert not target["partial"]


@pytest.mark.parametrize("config", ["vllm-ranks", "vllm-replicas"])
@pytest.mark.server
def test_each_rank_has_its_part(vllm: Vllm, other: Path) -> None:
    assert vllm.init().status_code == 200
    assert vllm.publish(tensors_of(other)) == [200, 200, 200]
    arrived = vllm.checksums()
    vllm.disk(other).raise_for_status()
    assert vllm.checksums() == arrived
    told = {name: tensor[:1] for name, tensor in tensors_of(other).items()}
    vllm.post("/start_weight_update").raise_for_status()
    refused = vllm.send(told)
    assert refused.status_code == 409
    assert vllm.post("/finish_weight_update").status_code == 409
    assert vllm.checksums() == arrived


@pytest.mark.server("vllm")
def test_what_does_not_fit_is_received_and_refused(vllm: Vllm, other: Path) -> None:
    start, sent = vllm.checksums(), tensors_of(other)
    name = "model.norm.weight"
    vllm.init().raise_for_status()
    vllm.post("/start_weight_update").raise_for_status()
    refused = vllm.send(sent | {name: torch.zeros(7)})
    assert refused.status_code == 409
    assert name in refused.json()["error"]["message"]
    ended = vllm.post("/finish_weight_update")
    assert ended.status_code == 409
    assert vllm.checksums() == start
    assert vllm.says(), "the target is whole: nothing is held"
    assert vllm.publish(sent) == [200, 200, 200], "the group outlasts it"
    assert changed(start, vllm.checksums())


@pytest.mark.server("vllm")
def test_a_torn_target_waits_for_a_whole_one(vllm: Vllm, other: Path) -> None:
    sent = tensors_of(other)
    last = list(sent)[-1]
    vllm.init().raise_for_status()
    vllm.post("/start_weight_update").raise_for_status()
    torn = vllm.send(sent | {last: torch.full_like(sent[last], float("nan"))})
    assert torn.status_code == 409
    assert "NaN" in torn.text
    assert vllm.post("/finish_weight_update").status_code == 409
    assert vllm.post("/resume").status_code == 409
    assert vllm.http.get("/health").status_code == 200
    assert vllm.target()["missing"]
    assert vllm.publish(sent) == [200, 200, 200]
    assert vllm.says(), "it goes on by itself"


@pytest.mark.server("vllm")
def test_an_update_that_lacks_tensors_does_not_end_well(vllm: Vllm, other: Path) -> None:
    sent = tensors_of(other)
    some = dict(list(sent.items())[:-3])
    vllm.init().raise_for_status()
    assert vllm.publish(some) == [200, 200, 409]
    assert vllm.publish(sent) == [200, 200, 200]


@pytest.mark.parametrize("end", ["dies", "is silent"])
@pytest.mark.server("vllm")
def test_a_trainer_that_goes_away_stops_nobody(vllm: Vllm, other: Path, end: str) -> None:
    sent = tensors_of(other)
    vllm.init().raise_for_status()
    vllm.post("/start_weight_update").raise_for_status()

    def leave() -> None:
        packed_nccl_broadcast_producer(iter(list(sent.values())[:3]), vllm.sender, 0, lambda tensor: tensor, 0)
        if end == "dies":
            vllm.sender = None  # its sockets close

    info = {
        "names": list(sent),
        "dtype_names": ["bfloat16"] * len(sent),
        "shapes": [list(t.shape) for t in sent.values()],
    }
    began = time.monotonic()
    answer = while_running(lambda: vllm.post("/update_weights", update_info=info | {"packed": False}), leave)
    assert answer.status_code == 409
    assert time.monotonic() - began < 40
    assert vllm.http.get("/health").status_code == 200
    again = vllm.send.__self__.post("/update_weights", update_info=info)
    assert again.status_code == 409
    assert "init_weight_transfer_engine" in again.text


@pytest.mark.parametrize("sent", [0, 3])
@pytest.mark.server("vllm")
def test_a_trainer_that_begins_anew_is_not_held_up(vllm: Vllm, other: Path, sent: int) -> None:
    """In the middle of its update, before or after the server has written; nobody but the server had paused."""
    tensors = tensors_of(other)
    info = {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }
    vllm.init(packed=False).raise_for_status()
    vllm.post("/start_weight_update").raise_for_status()
    lost = threading.Thread(target=lambda: vllm.post("/update_weights", update_info=info))
    lost.start()
    if sent:
        packed_nccl_broadcast_producer(iter(list(tensors.values())[:sent]), vllm.sender, 0, lambda tensor: tensor, 0)
    time.sleep(0.3)
    vllm.init().raise_for_status()
    lost.join(30)
    assert vllm.publish(tensors) == [200, 200, 200]
    assert vllm.says(), "it goes on by itself"


@pytest.mark.server("vllm")
def test_a_trainer_that_never_comes(vllm: Vllm) -> None:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    said: list[str] = []
    answer = while_running(
        lambda: vllm.post("/init_weight_transfer_engine", init_info=info), lambda: said.append(vllm.says())
    )
    assert answer.status_code == 400
    assert said == [vllm.says()], "it serves meanwhile"


REFUSED = {
    "rank 0 is the trainer's": ({"rank_offset": 0}, 400),
    "more ranks than the group": ({"rank_offset": 5}, 400),
    "no port": ({"master_port": None}, 400),
    "a port that is none": ({"master_port": 70000}, 400),
    "an id beside a store": ({"nccl_unique_id_b64": "AAAA"}, 400),
    "an id alone, too short": ({"nccl_unique_id_b64": "AAAA", "master_port": None, "master_address": None}, 400),
    "a field that nobody knows": ({"quick": True}, 400),
    "a backend of a GPU": ({"backend": "nccl"}, 400),
    "a backend that nobody knows": ({"backend": "ipc"}, 400),
}


@pytest.mark.server("vllm")
def test_what_is_refused(vllm: Vllm) -> None:
    place = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    for why, (fields, status) in REFUSED.items():
        answer = vllm.post("/init_weight_transfer_engine", init_info=place | fields)
        assert answer.status_code == status, (why, answer.text)
        assert answer.json()["error"]["message"], why
    assert vllm.post("/finish_weight_update").status_code == 200, "TRL's clean-up calls it where nothing is open"
    assert vllm.post("/update_weights", update_info={"names": []}).status_code == 409
    assert vllm.post("/update_weights", update_info=[]).status_code == 400
    assert vllm.post("/update_weights").status_code == 400
    assert vllm.post("/start_draft_weight_update").status_code == 400
    vllm.init().raise_for_status()
    assert vllm.post("/start_weight_update").status_code == 200
    assert vllm.post("/start_weight_update").status_code == 200, "nothing is written yet"
    assert vllm.post("/shutdown_weight_transfer_engine").status_code == 409
    assert vllm.post("/update_weights", update_info={"names": []}).status_code == 400, (
        "it names none, nor did one before"
    )
    assert vllm.post("/finish_weight_update").status_code == 200
    assert vllm.post("/shutdown_weight_transfer_engine").status_code == 200
    assert vllm.post("/start_weight_update").status_code == 409
    assert vllm.says()


@pytest.mark.server("vllm")
def test_a_call_that_is_repeated_gets_one_answer(vllm: Vllm, other: Path) -> None:
    sent, answers = tensors_of(other), []
    vllm.init().raise_for_status()
    vllm.post("/start_weight_update").raise_for_status()
    info = {
        "names": list(sent),
        "dtype_names": ["bfloat16"] * len(sent),
        "shapes": [list(t.shape) for t in sent.values()],
    }
    calls = [
        threading.Thread(target=lambda: answers.append(vllm.post("/update_weights", update_info=info))) for _ in "ab"
    ]
    for call in calls:
        call.start()
    time.sleep(0.5)
    another = vllm.post("/update_weights", update_info=info | {"packed": False})
    packed_nccl_broadcast_producer(iter(sent.values()), vllm.sender, 0, lambda tensor: tensor, CHUNK)
    for call in calls:
        call.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert another.status_code == 409
    assert vllm.post("/finish_weight_update", weight_version="seven").status_code == 200
    assert vllm.http.get("/weight_info").json() == {"weight_version": "seven"}


@contextlib.contextmanager
def rollout(vllm: Vllm) -> Iterator[Callable[[], dict[str, Any]]]:
    """A long one, running; gives a function that waits for its answer."""
    params = {"temperature": 1, "max_new_tokens": 400, "ignore_eos": True}
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(vllm.post("/generate", text="7*8", sampling_params=params)))
    thread.start()
    while not vllm.http.get("/tlt/v1/status").json()["load"]["running"]:
        time.sleep(0.01)

    def answer() -> dict[str, Any]:
        thread.join(60)
        meta: dict[str, Any] = found[0].raise_for_status().json()["meta_info"]
        return meta

    yield answer
    thread.join(60)


@pytest.mark.server("vllm")
def test_pauses(vllm: Vllm, other: Path) -> None:
    http = vllm.http
    assert http.post("/pause?mode=often").status_code == 400
    with rollout(vllm) as ended:
        assert http.post("/pause?mode=keep").json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        vllm.init().raise_for_status()
        assert vllm.publish(tensors_of(other)) == [200, 200, 200]
        assert http.get("/is_paused").json() == {"is_paused": True}, "who paused lets it go on"
        assert http.post("/resume").json() == {"status": "resumed"}
        meta = ended()
        assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == ("length", 400)
        assert len(meta["weight_versions"]) == 2, "it went on under the new weights"
    with rollout(vllm) as ended:
        assert http.post("/pause?mode=wait").status_code == 200
        assert ended()["completion_tokens"] == 400
        http.post("/resume").raise_for_status()
    with rollout(vllm) as ended:
        assert http.post("/pause").status_code == 200
        assert ended()["finish_reason"]["type"] == "abort"
        http.post("/resume").raise_for_status()
    with rollout(vllm) as ended:
        assert http.post("/reset_prefix_cache").json() == {"success": False}
        answer = http.post("/reset_prefix_cache", json={"reset_running_requests": True})
        assert answer.json() == {"success": True}
        assert ended()["completion_tokens"] == 400
    assert http.post("/reset_prefix_cache").json() == {"success": True}


@pytest.mark.server("vllm")
def test_sleep(vllm: Vllm) -> None:
    http = vllm.http
    assert http.post("/sleep?level=1").status_code == 400
    assert http.post("/sleep?level=0").json() == {"status": "sleeping", "level": 0}
    assert http.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert http.post("/sleep?level=2").json() == {"status": "sleeping", "level": 2}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert http.post("/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/wake_up?tags=dreams").status_code == 400
    assert vllm.says()


@pytest.mark.server("vllm")
def test_skyrl_sends_by_remote_calls(vllm: Vllm, other: Path) -> None:
    sent = tensors_of(other)
    vllm.init(packed=False).raise_for_status()
    vllm.http.post("/pause?mode=keep&clear_cache=false").raise_for_status()
    info = {
        "names": list(sent),
        "dtype_names": ["bfloat16"] * len(sent),
        "shapes": [list(t.shape) for t in sent.values()],
    }
    call = {"method": "update_weights_nccl", "kwargs": {"update_info": info | {"packed": True}}}
    vllm.post(
        "/collective_rpc", method="skyrl_start_weight_update", kwargs={"is_checkpoint_format": True}
    ).raise_for_status()
    answer = while_running(
        lambda: vllm.post("/collective_rpc", **call),
        lambda: packed_nccl_broadcast_producer(iter(sent.values()), vllm.sender, 0, lambda tensor: tensor, CHUNK),
    )
    assert answer.json() == {"results": [None]}
    assert "content-length" in answer.headers
    vllm.post("/collective_rpc", method="skyrl_finish_weight_update").raise_for_status()
    vllm.post("/resume").raise_for_status()
    assert vllm.post("/collective_rpc", method="eval", args=["1"]).status_code == 400
    arrived = vllm.checksums()
    vllm.disk(other).raise_for_status()
    assert vllm.checksums() == arrived


@pytest.mark.server("vllm")
def test_prime_rl_names_a_folder(vllm: Vllm, other: Path, tmp_path: Path) -> None:
    assert vllm.post("/init_broadcaster", host="127.0.0.1", port=1).status_code == 404
    assert vllm.http.get("/liveness").status_code == 200
    vllm.http.post("/pause?mode=keep&clear_cache=false").raise_for_status()
    refused = vllm.post("/update_weights", weight_dir=str(tmp_path))
    assert (refused.status_code, str(tmp_path) in refused.text) == (409, True)
    vllm.post("/update_weights", weight_dir=str(other)).raise_for_status()
    vllm.post("/resume").raise_for_status()
    arrived = vllm.checksums()
    vllm.disk(other).raise_for_status()
    assert vllm.checksums() == arrived
