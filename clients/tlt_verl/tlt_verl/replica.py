"""Replicas that verl starts; weights come by verl's own SGLang `ServerAdapter`."""

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from tlt_verl.started import StartedServer


class StartedReplica(SGLangReplica):
    """verl's replica, its names and placement with it. Reward models and teachers stay with verl's own server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            return
        if self.nnodes > 1:
            raise ValueError(
                f"a replica of {self.world_size} GPUs on nodes of {self.gpus_per_node}: tlt-server runs on one node, "
                "set rollout.tensor_model_parallel_size lower"
            )
        self.server_class = ray.remote(StartedServer)
