"""Weights for servers outside verl's Ray: the checkpoint engine `tlt` of verl's own checkpoint manager.

verl aborts what runs (a pause, and so one publication), asks actor and servers to prepare, has the actor send, and
resumes. Rank 0 of the actor sends by broadcasts to the ranks of one server after another, bucket by bucket.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from tlt_client import Client
from verl.checkpoint_engine.base import CheckpointEngine
from verl.workers.rollout.utils import ensure_async_iterator

from tlt_verl.bridge import keys

Named = tuple[str, torch.Tensor]


class ServerCheckpointEngine(CheckpointEngine):
    """One in each process of the actor.

    bucket_size: bytes; a larger tensor goes alone. is_master: whether this is rank 0. urls: of the servers, for the
    replicas. master_address: of rank 0's machine, where the servers reach it; ports there are the system's choice.
    transport: nccl, from a GPU that no server has, or gloo.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        urls: Iterable[str] = (),
        master_address: str = "127.0.0.1",
        transport: Literal["nccl", "gloo"] = "nccl",
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.master_address, self.transport = master_address, transport
        self.urls = list(urls)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,  # noqa: ARG003
        metadata: list[dict[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The actor is told the servers of this update: verl adds and removes replicas."""
        urls = [each["url"] for each in metadata[actor_wg_world_size:]]
        return {"urls": [urls] * actor_wg_world_size}, {}

    def init_process_group(self, urls: list[str]) -> None:
        self.urls = urls

    def finalize(self) -> None:
        pass

    async def send_weights(
        self, weights: Iterable[Named] | AsyncIterator[Named], global_steps: int | None = None
    ) -> None:
        """Raises an error of tlt_client: a server refused the weights, or is gone."""
        buckets = in_buckets(ensure_async_iterator(weights), self.bucket_size)
        if not self.is_master:
            async for _ in buckets:  # the ranks of the actor gather each tensor together
                pass
            return
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(url, **keys())) for url in self.urls]
            groups = []
            for client in clients:
                group = client.init_weights_update_group(self.master_address, backend=self.transport)
                stack.callback(client.destroy_weights_update_group, group)
                groups.append(group)
            version = None if global_steps is None else str(global_steps)
            async for bucket in buckets:
                for client, group in zip(clients, groups, strict=True):
                    client.update_weights_from_distributed(group, bucket, version, flush_cache=False)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[Named]:
        """Abstract in verl's class, whose own rollouts call it; with ours nobody does. NotImplementedError: they do."""
        raise NotImplementedError(
            "servers receive by themselves: set rollout.name=tlt beside checkpoint_engine.backend=tlt"
        )


async def in_buckets(weights: AsyncIterator[Named], most: int) -> AsyncIterator[list[Named]]:
    """At most `most` bytes each, or one tensor."""
    bucket: list[Named] = []
    size = 0
    async for name, tensor in weights:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
