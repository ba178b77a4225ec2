"""What runs in Ray's processes: verl's workers, as small as they can be on a machine without a GPU."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def prepare() -> None:
    """Of every process of Ray, before anything else: SGLang is imported without its GPU kernels."""
    from tlt_server.engine.cpu.install import install

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    install()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the server opens shared memory by name


def weights(folder: Path, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """A trained policy: the checkpoint's tensors, scaled."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            yield name, tensor * scale


class HybridWorker:
    """Rank 0 of one: actor and rollout in one process, with verl's own SGLang `ServerAdapter`."""

    def __init__(self, config: Any, model_config: Any) -> None:
        os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        from sglang.srt.utils import patch_torch
        from verl.workers.rollout.base import get_rollout_class
        from verl.workers.rollout.sglang_rollout import sglang_rollout

        # What of this path needs CUDA: tensors go by shared memory, not by CUDA IPC.
        sglang_rollout._to_ipc_device = lambda tensor: tensor
        patch_torch.monkey_patch_torch_reductions = lambda: None
        self.rollout = get_rollout_class(config.name)(config=config, model_config=model_config, device_mesh=None)

    async def update_weights(self, folder: Path, scale: float, global_steps: int) -> None:
        """As verl's `ActorRolloutRefWorker` with the naive backend."""
        await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(weights(folder, scale), global_steps=global_steps)
        await self.rollout.resume(tags=["kv_cache"])
