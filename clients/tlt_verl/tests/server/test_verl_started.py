"""A server that verl starts, by verl's own manager, client and `ServerAdapter`."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from cpu_workers import weights
from safetensors.torch import save_file
from tlt_client import AsyncClient, Client, SamplingParams
from verl_cpu import GREEDY, PROMPT, TARGET, Started, run

from tlt_verl.child import Child, ServerEnded

pytestmark = [pytest.mark.server, pytest.mark.filterwarnings("ignore")]


def checksums(url: str) -> Any:
    return httpx.post(f"{url}/weights_checker", json={"action": "checksum"}).raise_for_status().json()["ranks"]


def checkpoint(folder: Path, scale: float) -> Path:
    """The same weights as a worker's, as a checkpoint on disk."""
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(weights(TARGET, scale)), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_rollout_is_what_generate_answers(started: Started, server: Client) -> None:
    [output] = run(started.generate(max_tokens=40))
    told = server.generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=40), logprobs=True)
    assert tuple(output.token_ids) == told.tokens
    assert output.log_probs == pytest.approx(told.logprobs, abs=1e-4)
    assert output.stop_reason == told.finish_reason.type


def test_a_whole_step(started: Started, server: Client, tmp_path: Path) -> None:
    """verl puts the replicas to sleep, sends a policy by its own adapter, and samples from it."""
    replica = started.manager.rollout_replicas[0]
    [before] = run(started.generate(max_tokens=60))
    run(replica.sleep())
    ray.get(started.worker.update_weights.remote(TARGET, 0.7, global_steps=3))
    sent = checksums(started.url)
    [after] = run(started.generate(max_tokens=60))
    assert after.extra_fields["global_steps"] == after.extra_fields["min_global_steps"] == 3
    assert server.weight_version() == "3"
    assert after.token_ids != before.token_ids
    server.update_weights_from_disk(str(checkpoint(tmp_path / "policy", 0.7)), "3")
    assert checksums(started.url) == sent
    run(replica.sleep())
    ray.get(started.worker.update_weights.remote(TARGET, 1.0, global_steps=4))
    [again] = run(started.generate(max_tokens=60))
    assert (again.token_ids, again.extra_fields["global_steps"]) == (before.token_ids, 4)
    assert checksums(started.url) != sent


def test_an_abort_is_a_prefix_and_is_resumed(started: Started, server: Client) -> None:
    replica = started.manager.rollout_replicas[0]
    long = {"max_tokens": 500, "ignore_eos": True}
    [undisturbed] = run(started.generate(**long))

    async def disturb() -> None:
        while (await asyncio.to_thread(server.load)).running < 2:
            await asyncio.sleep(0.02)
        await replica.abort_all_requests()
        await asyncio.sleep(0.2)
        await replica.resume_generation()

    direct = replica.server_handle.generate.remote(
        prompt_ids=PROMPT, sampling_params=GREEDY | long, request_id="direct"
    )

    async def awaited() -> Any:
        return await direct

    resumed, cut, _ = run(started.generate(**long), awaited(), disturb())
    assert resumed.token_ids == undisturbed.token_ids
    assert len(resumed.log_probs) == len(resumed.token_ids) == 500
    assert cut.stop_reason == "abort"
    assert len(cut.log_probs) == len(cut.token_ids) < 500
    assert cut.token_ids == undisturbed.token_ids[: len(cut.token_ids)]


def test_a_request_waits_through_a_pause(started: Started) -> None:
    replica = started.manager.rollout_replicas[0]
    [undisturbed] = run(started.generate(max_tokens=20))
    run(replica.abort_all_requests())

    async def resume() -> None:
        await asyncio.sleep(0.5)
        await replica.resume_generation()

    waited, _ = run(started.generate(max_tokens=20), resume())
    assert waited.token_ids == undisturbed.token_ids


def test_memory_comes_and_goes(started: Started, server: Client) -> None:
    replica = started.manager.rollout_replicas[0]
    [before] = run(started.generate(max_tokens=20))
    for calls in (["sleep", "wake_up"], ["release_kv_cache", "resume_kv_cache"], ["clear_kv_cache"]):
        seen = server.events()[-1].number
        for call in calls:
            run(getattr(replica, call)())
        kinds = [event.kind for event in server.events(after=seen)]
        assert [kind for kind in kinds if kind.startswith("memory")] == ["memory_released", "memory_resumed"][
            : len(calls) // 2 * 2
        ]
        if calls[0] != "sleep":  # weights are to be sent again after that
            assert run(started.generate(max_tokens=20))[0].token_ids == before.token_ids
    ray.get(started.worker.update_weights.remote(TARGET, 1.0, global_steps=5))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"image_data": [b"pixels"]}, "image_data"),
        ({"prompt_ids": [5] * 5000}, "5000 tokens leaves no room"),
        ({"sampling_params": GREEDY | {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_params": GREEDY | {"temperature": -1.0}}, "temperature=-1.0"),
    ],
)
def test_what_cannot_be_is_refused(started: Started, asked: dict[str, Any], message: str) -> None:
    handle = started.manager.server_handles[0]
    usual = {"prompt_ids": PROMPT, "sampling_params": GREEDY, "request_id": "wrong"}
    with pytest.raises(ValueError, match=message):
        ray.get(handle.generate.remote(**(usual | asked)))


def test_a_server_that_cannot_start_says_why() -> None:
    child = Child(["--no-such-flag"], rank=7, visible_devices="")

    async def ready() -> None:
        async with AsyncClient(child.url) as client:
            await child.ready(client)

    with pytest.raises(ServerEnded, match=r"exit code \d.*no-such-flag.*\.log"):
        asyncio.run(ready())


def test_a_server_that_dies_is_named(started: Started) -> None:
    """The last test: it ends the server."""
    handle = started.manager.server_handles[0]
    pid = ray.get(handle.__ray_call__.remote(lambda self: self._child._process.pid))
    running = handle.generate.remote(
        prompt_ids=PROMPT, sampling_params=GREEDY | {"max_tokens": 550, "ignore_eos": True}, request_id="running"
    )
    os.kill(pid, signal.SIGKILL)
    for refs in (running, handle.generate.remote(prompt_ids=PROMPT, sampling_params=GREEDY, request_id="after")):
        with pytest.raises(ServerEnded, match=f"{started.url} ended with exit code -9"):
            ray.get(refs, timeout=60)
