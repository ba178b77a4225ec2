"""A server that verl starts: a child process beside its Ray actor, which needs no SGLang in its own process."""

from typing import Any

from tlt_client import AsyncClient, RequestUnserved, Retry
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from tlt_verl.bridge import MEMORY_S, Bridge
from tlt_verl.child import Child
from tlt_verl.flags import flags_of

RETRY = Retry(attempts=3)
"""A child that cannot be reached has ended: nobody starts it again."""


class StartedServer(Bridge):
    """In the place of verl's `SGLangHttpServer`, whose arguments it takes, if not all to use."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        rollout_mode: RolloutMode,
        replica_rank: int,
        cuda_visible_devices: str,
        base_gpu_id: int,
        **_: Any,
    ) -> None:
        super().__init__(config, model_config, rollout_mode)
        flags = flags_of(self.config, self.model_config, rollout_mode, base_gpu_id if cuda_visible_devices else None)
        self._arguments = flags, replica_rank, cuda_visible_devices

    async def launch_server(self, **_: Any) -> None:
        """Raises ServerEnded: it could not start, and why."""
        self._child = Child(*self._arguments)
        self.client = AsyncClient(self._child.url, control_timeout_s=MEMORY_S, retry=RETRY)
        await self._child.ready(self.client)

    def get_server_address(self) -> tuple[str, int]:
        return self._child.host, self._child.port

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """As `Bridge.generate`. ServerEnded: the child has."""
        try:
            return await super().generate(*args, **kwargs)
        except RequestUnserved:
            self._child.check()
            raise
