"""An actor apart from its servers, with the methods that verl's checkpoint manager calls."""

from pathlib import Path
from typing import Any

from cpu_workers import weights
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.single_controller.base.decorator import Dispatch, register


class ActorWorker:
    """One rank of an actor apart from its servers; what it trains is `weights` of a checkpoint."""

    def __init__(self, rollout: Any, rank: int, folder: Path) -> None:
        config = rollout.checkpoint_engine
        size = config.update_weights_bucket_megabytes << 20
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=rank == 0, bucket_size=size, **config.engine_kwargs[config.backend]
        )
        self._folder, self._scale = folder, 1.0

    def set_scale(self, scale: float | None) -> None:
        """None: of a model with another width."""
        self._scale = scale

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> Any:
        """As verl's `ActorRolloutRefWorker` with any other backend than naive."""
        tensors = weights(self._folder, self._scale or 1.0)
        if self._scale is None:
            tensors = ((name, tensor[..., :-1]) for name, tensor in tensors)
        return await self.checkpoint_engine.send_weights(tensors, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)
