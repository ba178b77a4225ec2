"""Servers that somebody else runs, outside verl's Ray: attached by URL."""

from typing import Any
from urllib.parse import urlsplit

import ray
from tlt_client import AsyncClient, TltClientError
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from tlt_verl.bridge import MEMORY_S, Bridge, keys


class AttachedServer(Bridge):
    """The actor of a server at `url`. verl's checkpoint manager takes it for the worker that receives weights, too:
    `ServerCheckpointEngine` sends them to the server itself."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, url: str) -> None:
        super().__init__(config, model_config, RolloutMode.STANDALONE)
        self._url = url
        self.client = AsyncClient(url, control_timeout_s=MEMORY_S, **keys())

    async def launch_server(self) -> None:
        """Raises ConnectionError: no server of this kind answers there."""
        try:
            await self.client.server_info()
        except TltClientError as error:
            raise ConnectionError(f"no rollout server at {self._url}: {error}") from None

    def execute_checkpoint_engine(self, method: str, **_: Any) -> dict[str, str] | None:
        """What verl's checkpoint manager asks of every worker before and after an update."""
        return {"url": self._url} if method == "prepare" else None

    async def update_weights(self, global_steps: int | None = None) -> None:
        """The weights of this step are on their way, from the actor."""
        self.global_steps = global_steps


class AttachedReplica(RolloutReplica):
    """One of `checkpoint_engine.engine_kwargs.tlt.urls`, which has one for each replica."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def init_hybrid(self, *_: Any) -> None:
        raise ValueError(OUTSIDE)

    async def init_colocated(self, *_: Any) -> None:
        raise ValueError(OUTSIDE)

    async def launch_servers(self) -> None:
        url = url_of(self.config, self.replica_rank)
        actor = ray.remote(AttachedServer).options(max_concurrency=self.max_concurrency)
        server = actor.remote(config=self.config, model_config=self.model_config, url=url)
        await server.launch_server.remote()
        self.servers = self.workers = [server]
        self._server_handle, self._server_address = server, urlsplit(url).netloc


OUTSIDE = (
    "rollout.name=tlt is for servers outside verl's Ray, with GPUs of their own: set "
    "trainer.v1.trainer_mode=separate_async and actor_rollout_ref.hybrid_engine=False, or rollout.name=sglang"
)


def url_of(config: RolloutConfig, rank: int) -> str:
    """Raises ValueError: there is not one URL for each replica."""
    size = config.tensor_model_parallel_size * config.data_parallel_size
    replicas = config.nnodes * config.n_gpus_per_node // size
    urls: list[str] = list(config.checkpoint_engine.engine_kwargs.get("tlt", {}).get("urls") or [])
    if config.checkpoint_engine.backend != "tlt" or len(set(urls)) != replicas:
        raise ValueError(
            f"{replicas} replicas (nnodes * n_gpus_per_node / tensor_model_parallel_size) need as many servers: "
            f"set checkpoint_engine.backend=tlt, and checkpoint_engine.engine_kwargs.tlt.urls, which is {urls}"
        )
    return urls[rank]
