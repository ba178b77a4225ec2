"""An RL trainer as a server sees it: upstream's routes under upstream's names, with the calls that carry weights.

Its calls answer the response, whatever it is; for who wants an error there is tlt-client, which it sends by.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from tlt_client.weights.group import Opening, WeightsUpdateGroup
from tlt_client.weights.tensors import FlatBucket, serialized

from benchmarks.lib.reload.weights import Tensors
from benchmarks.lib.servers import KEPT

JOIN_S = 60.0


class Trainer:
    """Its calls; each answers the response.

    url: of the server.
    ranks: that hold a part of the target.
    device: where the tensors to broadcast lie; a GPU that no rank of the server has, since NCCL wants one each.
    """

    def __init__(self, url: str, ranks: int = 1, device: str = "cpu") -> None:
        self.http = httpx.Client(base_url=url, timeout=60, limits=KEPT)
        self.ranks, self._device = ranks, device
        self._group: WeightsUpdateGroup | None = None

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
        told = [serialized(list(each.items())) for each in payloads]
        return self.post("/update_weights_from_tensor", serialized_named_tensors=told, **fields)

    def bucket(self, tensors: Tensors, **fields: Any) -> httpx.Response:
        """As one flat tensor, the way of colocated trainers."""
        flat = FlatBucket(list(tensors.items()))
        told = {"serialized_named_tensors": flat.serialized(1), "load_format": "flattened_bucket"}
        answer = self.post("/update_weights_from_tensor", **told, **fields)
        flat.unlink()
        return answer

    def distributed(self, tensors: Tensors, **fields: Any) -> httpx.Response:
        """Over gloo or NCCL, this process being rank 0. Returns once all was received: a refusal must not hang it."""
        group = self._group = self._group or self._joined()
        asked = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": group.name,
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/update_weights_from_distributed", **asked, **fields)
            for tensor in tensors.values():
                group.broadcast(tensor.contiguous().to(self._device)).result()
            return answer.result()

    def _joined(self) -> WeightsUpdateGroup:
        if self._device != "cpu":
            torch.cuda.set_device(self._device)
        opening = Opening("127.0.0.1", 1 + self.ranks, "gloo" if self._device == "cpu" else "nccl", JOIN_S)
        self.post("/init_weights_update_group", **opening.asked).raise_for_status()
        return opening.group()

    def leave(self) -> None:
        """Its end of the group is gone, as when the trainer ends; the server is told nothing."""
        assert self._group is not None
        self._group.close()
        self._group = None

    @property
    def group_name(self) -> str:
        """Of the group that it is in."""
        assert self._group is not None
        return self._group.name

    def close(self) -> None:
        if self._group is not None:
            self.post("/destroy_weights_update_group", group_name=self._group.name).raise_for_status()
            self._group.close()
        self.http.close()
