"""A server that verl did not start: attached by URL, weights by verl's own checkpoint manager and our engine."""

from collections.abc import Iterator
from typing import Any

import pytest
from tlt_client import Client, SamplingParams
from verl_cpu import GREEDY, PROMPT, TARGET, LLMServerManager, Started, configured, parts, ray, run

pytestmark = [pytest.mark.server, pytest.mark.filterwarnings("ignore")]

OVERRIDES = (
    "name=tlt",
    "nnodes=1",
    "n_gpus_per_node=1",
    "checkpoint_engine.backend=tlt",
    "checkpoint_engine.update_weights_bucket_megabytes=1",
    "checkpoint_engine.engine_kwargs.tlt.transport=gloo",
)


def attached(url: str, *more: str) -> Any:
    config = configured(*OVERRIDES, f"checkpoint_engine.engine_kwargs.tlt.urls=['{url}']", *more)
    return config, LLMServerManager.create(config)


@pytest.fixture(scope="module")
def synced(started: Started) -> Iterator[Any]:
    """verl's checkpoint manager, an actor of two ranks, and the client of an attached server; left at scale 1."""
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
    from verl_actor import ActorWorker

    config, manager = attached(started.url)
    rollout, _ = parts(config)
    actor = ray.remote(ActorWorker)
    handles = [actor.remote(rollout, rank, TARGET) for rank in range(2)]
    group = RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=actor))
    weights = CheckpointEngineManager(config=rollout.checkpoint_engine, actor_wg=group, replicas=manager.get_replicas())
    yield weights, handles, manager.get_client()
    for handle in handles:
        ray.kill(handle)


def test_a_whole_step(started: Started, server: Client, synced: Any) -> None:
    weights, handles, client = synced
    asked = {"prompt_ids": PROMPT, "sampling_params": GREEDY | {"max_tokens": 60}}
    [before] = run(client.generate("any", **asked))
    first = server_checksums(started.url)
    ray.get([handle.set_scale.remote(0.7) for handle in handles])
    weights.update_weights(global_steps=11)
    sent = server_checksums(started.url)
    [after] = run(client.generate("any", **asked))
    assert after.extra_fields["global_steps"] == 11
    assert after.token_ids != before.token_ids
    assert tuple(after.token_ids) == server.generate(PROMPT, SamplingParams(temperature=0, max_new_tokens=60)).tokens
    ray.get(started.worker.update_weights.remote(TARGET, 0.7, global_steps=12))  # the same, by another way
    assert server_checksums(started.url) == sent
    assert sent != first
    ray.get([handle.set_scale.remote(1.0) for handle in handles])
    weights.update_weights(global_steps=13)
    assert server_checksums(started.url) == first
    assert run(client.generate("any", **asked))[0].token_ids == before.token_ids


def test_weights_of_another_model_are_refused(synced: Any) -> None:
    weights, handles, client = synced
    asked = {"prompt_ids": PROMPT, "sampling_params": GREEDY | {"max_tokens": 20}}
    [before] = run(client.generate("any", **asked))
    ray.get([handle.set_scale.remote(None) for handle in handles])
    with pytest.raises(Exception, match=r"lm_head\.weight: its shape is"):
        weights.update_weights(global_steps=14)
    ray.get([handle.set_scale.remote(1.0) for handle in handles])
    weights.update_weights(global_steps=15)  # generation was paused, and memory released: a whole update heals
    assert run(client.generate("any", **asked))[0].token_ids == before.token_ids


def test_a_wrong_url_is_named(cluster: None) -> None:
    with pytest.raises(ConnectionError, match=r"no rollout server at http://127\.0\.0\.1:9"):
        attached("http://127.0.0.1:9")


@pytest.mark.parametrize("override", ["n_gpus_per_node=2", "checkpoint_engine.backend=naive"])
def test_each_replica_has_a_server(cluster: None, override: str) -> None:
    with pytest.raises(ValueError, match="need as many servers"):
        attached("http://127.0.0.1:9", override)


def server_checksums(url: str) -> Any:
    import httpx

    return httpx.post(f"{url}/weights_checker", json={"action": "checksum"}).raise_for_status().json()["ranks"]
