"""Whole steps of the trainers that speak SGLang's API, call by call, as their sources make them, and what they read of
the answers: the weights have arrived, by every transport that a CPU can do."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from tests.server.areal import BUILDERS, HttpRequest, Rollout
from tests.server.conftest import PROMPTS
from tests.server.trainer import Tensors, Trainer, buckets, noisy, tensors_of, until_under_way
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference
from tlt_server.process import free_port

pytestmark = pytest.mark.server("eagle-chain")

TARGET, _ = default_paths()
LONG = {"temperature": 1.0, "ignore_eos": True}
ABORTED, WHOLE = 1500, 300
"""Tokens of rollouts that are to be aborted in time on a busy machine too, and of those that are waited for."""
Checksums = list[dict[str, str]]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(TARGET, tmp_path_factory.mktemp("targets") / "moved", seed=8)


@pytest.fixture
def arrived(trainer: Trainer, moved: Path) -> Iterator[Callable[[], bool]]:
    """Whether the target is `moved`, which it is not at first."""
    trainer.disk(moved).raise_for_status()
    wanted = trainer.checksums()
    trainer.disk(TARGET, weight_version="start").raise_for_status()
    assert trainer.checksums() != wanted
    yield lambda: trainer.checksums() == wanted
    trainer.post("/continue_generation").raise_for_status()
    trainer.disk(TARGET).raise_for_status()


def made(trainer: Trainer, endpoint: str, **payload: Any) -> Any:
    """As slime's, Miles' and NeMo-RL's `_make_request`: a body that is JSON."""
    return trainer.post(f"/{endpoint}", **payload).raise_for_status().json()


def flushed(trainer: Trainer) -> bool:
    """slime and Miles try this 60 times, a second apart, NeMo-RL once."""
    return trainer.http.get("/flush_cache").status_code == 200


def requests_at(trainer: Trainer) -> int:
    loads = trainer.http.get("/v1/loads?include=core").raise_for_status().json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def generate(trainer: Trainer, tokens: int = ABORTED) -> list[dict[str, Any]]:
    body = {"text": PROMPTS[:4], "sampling_params": LONG | {"max_new_tokens": tokens}, "return_logprob": True}
    answers: list[dict[str, Any]] = trainer.http.post("/generate", json=body).raise_for_status().json()
    return answers


def until_requests(trainer: Trainer, wanted: Callable[[int], bool], within_s: float = 20) -> None:
    until = time.monotonic() + within_s
    while not wanted(requests_at(trainer)):
        assert time.monotonic() < until
        time.sleep(0.01)


def send_by(trainer: Trainer, transport: str, tensors: Tensors, **fields: Any) -> None:
    send = trainer.bucket if transport == "tensor" else trainer.distributed
    for part in buckets(tensors, 5):
        answer = send(part, flush_cache=False, **fields)
        assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text


def published(folder: Path, version: int, model: Path) -> Path:
    """As slime publishes a whole checkpoint."""
    place = folder / f"weight_v{version:06d}"
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(model)
    return place


@pytest.mark.parametrize("transport", ["distributed", "tensor", "disk", "local disk"])
def test_slime(trainer: Trainer, arrived: Callable[[], bool], moved: Path, tmp_path: Path, transport: str) -> None:
    """slime 624b824, external engines: sglang_utils/{external,server_control,sglang_engine}.py."""
    info = trainer.http.get("/server_info").raise_for_status().json()
    assert (info["tp_size"], info["pp_size"], info["ep_size"], info["disaggregation_mode"]) == (1, 1, 1, "null")
    assert not info["enable_memory_saver"]  # compared with --offload-rollout
    with ThreadPoolExecutor(1) as pool:
        rollouts = pool.submit(generate, trainer)
        until_under_way(trainer)
        while requests_at(trainer) > 0:
            trainer.post("/abort_request", abort_all=True).raise_for_status()
            time.sleep(0.02)
    for answer in rollouts.result():
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert [each[1] for each in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    source, local = tmp_path / "published", tmp_path / "local"
    place = published(source, 3, moved)
    if transport == "local disk":
        folders = {"local_checkpoint_dir": str(local), "source_dir": str(source)}
        for version in (0, 3):
            assert made(trainer, "pull_weights", **folders, target_version=version)["success"]
    made(trainer, "pause_generation")
    assert flushed(trainer)
    made(trainer, "post_process_weights", restore_weights_before_load=True, post_process_quantization=False)
    if transport.endswith("disk"):
        path = local if transport == "local disk" else place
        assert made(trainer, "update_weights_from_disk", model_path=str(path), weight_version="3")["success"]
    else:
        send_by(trainer, transport, tensors_of(moved), weight_version="3")
    made(trainer, "post_process_weights", restore_weights_before_load=False, post_process_quantization=True)
    assert trainer.http.get("/get_weight_version").json()["weight_version"] == "3"
    made(trainer, "continue_generation")
    assert trainer.http.get("/health_generate").status_code == 200
    assert arrived()


@pytest.mark.parametrize(
    ("transport", "mode"), [("distributed", "retract"), ("tensor", "in_place"), ("tensor", "abort")]
)
def test_miles(trainer: Trainer, arrived: Callable[[], bool], moved: Path, transport: str, mode: str) -> None:
    """Miles 31f1ca9: update_weight_from_distributed/mixin.py; the version is named before the session ends."""
    assert trainer.http.get("/health_generate", headers={"Authorization": "Bearer None"}).status_code == 200
    assert flushed(trainer)
    info, url = trainer.http.get("/get_server_info").raise_for_status().json(), trainer.http.base_url
    assert (info["host"], info["port"], info["base_gpu_id"], info["node_rank"]) == (url.host, url.port, 0, 0)
    parallelism = trainer.http.get("/parallelism_config", params={"rank": 0}).raise_for_status().json()
    assert (parallelism["tp_size"], parallelism["tp_rank"], parallelism["world_size"]) == (1, 0, 1)
    for rank in (1, -1):
        assert trainer.http.get("/parallelism_config", params={"rank": rank}).status_code == 400
    with ThreadPoolExecutor(1) as pool:
        rollouts = pool.submit(generate, trainer, ABORTED if mode == "abort" else WHOLE)
        until_under_way(trainer)
        made(trainer, "pause_generation", mode=mode)
        if mode != "in_place":
            assert flushed(trainer)
        assert made(trainer, "begin_weight_update", selector="all")["success"]
        send_by(trainer, transport, tensors_of(moved), weight_version="4", selector="all")
        assert made(trainer, "update_weight_version", new_version="4", abort_all_requests=False)["success"]
        assert made(trainer, "end_weight_update")["success"]
        made(trainer, "continue_generation")
        ends = {answer["meta_info"]["finish_reason"]["type"] for answer in rollouts.result()}
    assert ends == ({"abort"} if mode == "abort" else {"length"})
    assert trainer.http.get("/model_info").json()["weight_version"] == "4"
    assert arrived()


def test_loads_are_told_during_a_pause(trainer: Trainer) -> None:
    """slime aborts until there are none."""
    with ThreadPoolExecutor(1) as pool:
        rollouts = pool.submit(generate, trainer)
        until_under_way(trainer, 4)
        made(trainer, "pause_generation", mode="retract")
        try:
            until_requests(trainer, lambda count: count == 4)
            trainer.post("/abort_request", abort_all=True).raise_for_status()
            until_requests(trainer, lambda count: count == 0)
            assert {answer["meta_info"]["finish_reason"]["type"] for answer in rollouts.result()} == {"abort"}
        finally:
            made(trainer, "continue_generation")


class Areal:
    """Its `RemoteInfEngine`, with one server."""

    def __init__(self, trainer: Trainer, requests: Any) -> None:
        self.http, self.requests = trainer.http, requests
        parallel = SimpleNamespace(tp_size=1, pp_size=1, world_size=1)
        place = {"nccl_master_address": "127.0.0.1", "nccl_master_port": free_port(), "use_lora": False}
        group = {"nccl_group_name": "update_weight_group_0", "gen_allocation": SimpleNamespace(parallel=parallel)}
        self.meta = SimpleNamespace(**place, **group, path=None)

    def run(self, request: HttpRequest) -> Any:
        answer = self.http.request(request.method, request.endpoint, json=request.payload).raise_for_status()
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    def join(self) -> Any:
        """Server and trainer meet, whoever comes first."""
        from sglang.srt.utils import init_custom_process_group

        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self.run, self.requests.build_init_weights_group_request("a", 0, self.meta))
            group = init_custom_process_group(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{self.meta.nccl_master_port}",
                world_size=2,
                rank=0,
                group_name=self.meta.nccl_group_name,
            )
            assert joining.result()["success"]
        return group

    def send(self, group: Any, tensors: Tensors) -> None:
        dtypes = {name: str(tensor.dtype).split("torch.")[1] for name, tensor in tensors.items()}
        specs = [SimpleNamespace(name=n, dtype=dtypes[n], shape=tuple(t.shape)) for n, t in tensors.items()]
        with ThreadPoolExecutor(1) as pool:
            (request,) = self.requests.build_distributed_weight_update_requests(self.meta, specs).requests
            answer = pool.submit(self.run, request)
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor.contiguous(), src=0, group=group)
            assert answer.result()["success"]

    def generate(self, prompt: list[int], most: int) -> tuple[list[int], str]:
        """Its loop: what was aborted is sent again with the tokens that it has, until it ends."""
        tokens: list[int] = []
        reason = ""
        while reason not in ("stop", "tool_calls", "length") and len(tokens) < most:
            rollout = Rollout(prompt + tokens, most - len(tokens))
            reply = self.requests.parse_generation_response(
                self.run(self.requests.build_generation_request(rollout, with_lora=False, version=0))
            )
            assert len(reply.output_tokens) == len(reply.output_logprobs)
            tokens, reason = tokens + reply.output_tokens, reply.stop_reason
        return tokens, "length" if reason == "abort" else reason


@pytest.fixture(params=BUILDERS)
def areal(request: pytest.FixtureRequest, trainer: Trainer) -> Areal:
    return Areal(trainer, BUILDERS[request.param]())


def test_areal(areal: Areal, arrived: Callable[[], bool], moved: Path, reference: Reference) -> None:
    """AReaL 1.0.4: infra/remote_inf_engine.py. A trainer that begins anew opens a group of the same name."""
    assert areal.run(areal.requests.get_health_check_request()) == ""
    prompt = list(reference.tokens(PROMPTS[0]))
    undisturbed, _ = areal.generate(prompt, 64)
    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(areal.generate, prompt, 64)
        for _ in range(8):
            areal.http.post("/abort_request", json={"abort_all": True}).raise_for_status()
            time.sleep(0.02)
        assert going_on.result()[0] == undisturbed
    for _ in range(2):
        areal.meta.nccl_master_port = free_port()
        group = areal.join()
        areal.run(areal.requests.get_pause_request())
        for part in buckets(tensors_of(moved), 3):
            areal.send(group, part)
        areal.run(areal.requests.get_resume_request())
        assert arrived()
        torch.distributed.destroy_process_group(group)
        areal.meta.path = TARGET
        (request,) = areal.requests.build_disk_weight_update_requests(areal.meta).requests
        assert areal.run(request)["success"]
        assert not arrived()
    areal.http.post("/destroy_weights_update_group", json={"group_name": areal.meta.nccl_group_name}).raise_for_status()


def test_areals_groups_of_a_pipeline_stage_are_refused(areal: Areal) -> None:
    request = areal.requests.build_init_weights_group_request("a", 0, areal.meta)
    answer = areal.http.post(request.endpoint, json=request.payload | {"pp_rank": 1})
    assert (answer.status_code, answer.json()["success"]) == (501, False)
    assert "pp_rank 1, of 1 pipeline stages" in answer.json()["message"]


def test_nemo_rl(trainer: Trainer, arrived: Callable[[], bool], moved: Path) -> None:
    """NeMo-RL 7ea279a: weight_sync/http_weight_synchronizer.py, sglang/sglang_{worker,generation}.py."""
    assert trainer.http.get("/health_generate", headers={"Authorization": "Bearer None"}).status_code == 200
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "no_stop_trim": True, "ignore_eos": True}
    body = {"sampling_params": sampling | {"spaces_between_special_tokens": False}, "return_logprob": True}
    answer = made(trainer, "generate", **body, input_ids=[5, 6, 7])
    assert len(answer["meta_info"]["output_token_logprobs"]) == 8
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert flushed(trainer)
    made(trainer, "release_memory_occupation", tags=["weights", "kv_cache", "cuda_graph"])
    made(trainer, "resume_memory_occupation", tags=["weights"])
    for part in buckets(tensors_of(moved), 3):
        assert trainer.bucket(part, flush_cache=False, weight_version="5").raise_for_status().json()["success"]
    made(trainer, "resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    assert arrived()
    made(trainer, "generate", **body, input_ids=[5, 6, 7])


def test_a_flush_that_follows_the_last_answer_at_once_is_done(trainer: Trainer) -> None:
    """NeMo-RL flushes once. On busy cores the step that overlapped the last one is still under way by then."""
    with ExitStack() as ended:
        for _ in range(2):
            busy = ended.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            ended.callback(busy.kill)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        for _ in range(40):
            made(trainer, "generate", **body)
            assert flushed(trainer)


def test_a_trainer_that_leaves_within_an_update(trainer: Trainer, arrived: Callable[[], bool], moved: Path) -> None:
    """Its session and its group are open, and a broadcast is awaited: the server answers, and the next one heals."""
    trainer.http.timeout = httpx.Timeout(30)
    made(trainer, "pause_generation", mode="retract")
    made(trainer, "begin_weight_update")
    parts = buckets(tensors_of(moved), 2)
    trainer.distributed(parts[0], flush_cache=False).raise_for_status()
    names = list(parts[1])
    shapes = {"dtypes": ["float32"] * len(names), "shapes": [list(parts[1][name].shape) for name in names]}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            trainer.post, "/update_weights_from_distributed", names=names, **shapes, group_name=trainer.group_name
        )
        time.sleep(0.3)
        trainer.leave()
        assert waiting.result().status_code == 400
    assert requests_at(trainer) == 0
    made(trainer, "pause_generation", mode="retract")
    made(trainer, "begin_weight_update")
    send_by(trainer, "distributed", tensors_of(moved))
    assert made(trainer, "end_weight_update")["success"]
    assert arrived()
