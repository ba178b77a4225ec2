"""An RL trainer as a server sees it: other weights of the same shape, and the calls that carry them."""

import base64
import io
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from tlt_server.demo import default_paths, eagle3_path
from tlt_server.process import free_port

Tensors = dict[str, torch.Tensor]

# The servers of the tests of hot reload: a chain and a tree, EAGLE and EAGLE-3.
CHAIN = ["--arm", "3,1,4"]
TREE = ["--drafter", str(eagle3_path()), "--arm", "5,4,16"]
PLAIN = ["--no-speculation"]
DRAFTERS = {"chain": default_paths()[1], "tree": eagle3_path()}
SERVERS = {"chain": CHAIN, "tree": TREE}

torch.multiprocessing.set_sharing_strategy("file_system")  # the server opens shared memory by name


def tensors_of(model: Path) -> Tensors:
    return load_file(model / "model.safetensors")


def copied(model: Path, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A model's folder with other weights in it."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def noisy(model: Path, folder: Path, seed: int, scale: float = 0.02) -> Path:
    """A model's folder with noise of `scale` times each tensor's deviation on its matrices: another policy, as near as
    one RL step's, so that a drafter still knows it."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        return tensor + scale * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    return copied(model, folder, {name: moved(tensor) for name, tensor in tensors_of(model).items()})


def shuffled(model: Path, folder: Path, seed: int) -> Path:
    """A model's folder with random weights in it, of the same names and shapes: a drafter that knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.02 if tensor.dim() > 1 else tensor
        for name, tensor in tensors_of(model).items()
    }
    return copied(model, folder, tensors)


def buckets(tensors: Tensors, count: int) -> list[Tensors]:
    """The tensors in `count` parts, as trainers send them."""
    names = sorted(tensors)
    parts = [names[i::count] for i in range(min(count, len(names)))]
    return [{name: tensors[name] for name in part} for part in parts]


class Trainer:
    """The calls of an RL trainer, upstream's routes under upstream's names; each answers the response."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
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
        ranks = [tensors] if isinstance(tensors, dict) else tensors
        payloads = [_serialized(list(each.items())) for each in ranks]
        return self.post("/update_weights_from_tensor", serialized_named_tensors=payloads, **fields)

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
        """Over gloo, this process being rank 0. Returns once every tensor was received: a refusal must not hang it."""
        asked = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": "trainer",
        }
        self._joined  # noqa: B018 - joins once
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/update_weights_from_distributed", **asked, **fields)
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor.contiguous(), src=0, group=self._group)
            return answer.result()

    @cached_property
    def _joined(self) -> bool:
        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        place = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(
                self.post, "/init_weights_update_group", **place, group_name="trainer", backend="gloo"
            )
            self._group = init_custom_process_group(
                backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="trainer"
            )
            joining.result().raise_for_status()
        return True

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


def while_running(work: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """What `work` returns, run in a thread while `meanwhile` runs here."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        meanwhile()
        return result.result()


def changed(before: Iterable[dict[str, str]], after: Iterable[dict[str, str]]) -> set[str]:
    """Names of the parameters that differ on any rank."""
    return {name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name]}
