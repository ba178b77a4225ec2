"""Drafters as folders, and the tensors that a drafter shares with its target's checkpoint."""

import copy
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tlt_server.drafter.folder import write
from tlt_server.drafter.published import read
from tlt_server.drafter.target import CPU, read_tensor
from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.memory import move
from tlt_server.trainer.learn.network import Network, network

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Drafter:
    """A network to train, and the config.json that it came with, which its exports keep."""

    network: Network
    config: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Of its file."""
        dtype: torch.dtype = getattr(torch, self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        return dtype

    def copied(self) -> "Drafter":
        """As it is now, on the CPU, in the dtype of its file: training goes on."""
        copied = copy.deepcopy(self.network).requires_grad_(False).to(self.dtype)
        device = next(copied.parameters()).device
        move(copied, CPU)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # until it is there
        return Drafter(copied, self.config)

    def weights(self) -> dict[str, torch.Tensor]:
        """All that a drafter's file holds, on the CPU."""
        state, dtype = self.network.state_dict(), self.dtype
        return {name: (x.to(dtype).cpu() if x.is_floating_point() else x.cpu()) for name, x in state.items()}

    def export(self, out: Path, provenance: Mapping[str, str]) -> None:
        """Writes a folder that SGLang loads as a drafter, whole or not at all; `provenance` into its file's metadata.
        Raises ConfigError: `out` exists. Raises DiskFailed: it cannot be written."""
        if out.exists():
            raise ConfigError(f"{out}: exists. Remove it, or name another folder")
        try:
            config = json.dumps(self.config, indent=2).encode() + b"\n"
            write(config, self.weights(), {"trained": "yes", **provenance}, out)
        except (OSError, SafetensorError) as error:
            raise DiskFailed(f"drafter {out} cannot be written ({error}): make room there") from error


def load_drafter(folder: Path) -> Drafter:
    """A drafter's folder, in whatever form it is published, in float32. Raises ConfigError: it cannot be read, its
    tensors are not what its config says, or it is of a kind that cannot be trained."""
    found = read(folder)
    try:
        made, tensors = network(found.config), found.tensors()
        if "d2t" in tensors:
            drafted = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
            tensors["t2d"] = torch.zeros(found.config["vocab_size"], dtype=torch.bool).index_fill(0, drafted, True)
        made.load_state_dict(tensors)
    except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"drafter {folder}: {' '.join(str(error).split())}") from error
    return Drafter(made, found.config)


def load_frozen(
    folder: Path,
    version: int,
    dtype: torch.dtype = torch.float32,
    like: Frozen | None = None,
    device: torch.device = CPU,
) -> Frozen:
    """Embedding and head of a target's folder, tied where it has no head; of the shapes of `like`. Raises ConfigError:
    they are not there, do not fit, or are not finite."""
    wanted = [((EMBEDDING,), like and like.embedding), (("lm_head.weight", EMBEDDING), like and like.head)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        read = pool.map(lambda each: read_tensor(folder, *each[0], like=each[1], device=device).to(dtype), wanted)
        embedding, head = read
    if not all(torch.isfinite(torch.stack(torch.aminmax(each))).all() for each in (embedding, head)):
        raise ConfigError(f"target {folder}: its embedding or head is not finite")
    return Frozen(embedding, head, version)
