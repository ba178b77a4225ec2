"""An RL trainer as a server sees it: upstream's routes under upstream's names, with the calls that carry weights."""

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.lib.reload.weights import Tensors
from benchmarks.lib.servers import KEPT
from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.process import free_port

torch.multiprocessing.set_sharing_strategy("file_system")  # the server opens shared memory by name


class Trainer:
    """Its calls; each answers the response.

    url: of the server.
    ranks: that hold a part of the target.
    device: where the tensors to broadcast lie; a GPU that no rank of the server has, since NCCL wants one each.
    """

    def __init__(self, url: str, ranks: int = 1, device: str = "cpu") -> None:
        mend_torchvision()  # SGLang imports it
        self.http = httpx.Client(base_url=url, timeout=60, limits=KEPT)
        self.ranks, self._device = ranks, device
        self._group: Any = None

    def post(self, route: str, **fields: Any) -> httpx.Response:
        return self.http.post(route, json=fields)

    def checksums(self) -> list[dict[str, str]]:
        """Of every parameter, by name, on each rank; the drafter's begin with `draft.`."""
        answer = self.post("/weights_checker", action="checksum").raise_for_status().json()
        return [rank["checksums"] for rank in answer["ranks"]]

    def drafter(self, path: Path, **fields: Any) -> httpx.Response:
        return self.post("/tlt/v1/drafter/update", path=str(path), **fields)

    def disk(self, model: Path, **fields: Any) -> httpx.Response:
        return self.post("/update_weights_from_disk", model_path=str(model), **fields)

    def tensor(self, tensors: Tensors | Sequence[Tensors], **fields: Any) -> httpx.Response:
        """One payload for each rank."""
        payloads = [tensors] * self.ranks if isinstance(tensors, dict) else tensors
        serialized = [_serialized(list(each.items())) for each in payloads]
        return self.post("/update_weights_from_tensor", serialized_named_tensors=serialized, **fields)

    def bucket(self, tensors: Tensors, **fields: Any) -> httpx.Response:
        """As one flat tensor, the way of colocated trainers."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=list(tensors.items()))
        payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        return self.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[_serialized(payload)],
            load_format="flattened_bucket",
            **fields,
        )

    def distributed(self, tensors: Tensors, **fields: Any) -> httpx.Response:
        """Over gloo or NCCL, this process being rank 0. Returns once all was received: a refusal must not hang it."""
        asked = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": "trainer",
        }
        if self._group is None:
            self._join()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/update_weights_from_distributed", **asked, **fields)
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor.contiguous().to(self._device), src=0, group=self._group)
            return answer.result()

    def _join(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        port, world = free_port(), 1 + self.ranks
        backend = "gloo" if self._device == "cpu" else "nccl"
        place = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": world}
        if backend == "nccl":
            torch.cuda.set_device(self._device)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(
                self.post, "/init_weights_update_group", **place, group_name="trainer", backend=backend
            )
            self._group = init_custom_process_group(
                backend=backend, init_method=f"tcp://127.0.0.1:{port}", world_size=world, rank=0, group_name="trainer"
            )
            joining.result().raise_for_status()

    def leave(self) -> None:
        """Its end of the group is gone, as when the trainer ends; the server is told nothing."""
        torch.distributed.destroy_process_group(self._group)
        self._group = None

    def close(self) -> None:
        if self._group is not None:
            self.post("/destroy_weights_update_group", group_name="trainer").raise_for_status()
            torch.distributed.destroy_process_group(self._group)
        self.http.close()


def _serialized(payload: Any) -> str:
    """As SGLang's clients do: a pickle that holds the name of shared memory, in base64."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()
