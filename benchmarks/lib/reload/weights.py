"""Other weights of the same shape: what an RL trainer and a drafter's trainer send to a running server."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def tensors_of(model: Path) -> Tensors:
    """All tensors in a model's folder, by name."""
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def copied(model: Path, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A model's folder with other weights in it, in one file."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def noisy(model: Path, folder: Path, seed: int, scale: float = 0.02) -> Path:
    """A model's folder with noise of `scale` times each tensor's deviation on its matrices: another policy, as near as
    one RL step's, so that a drafter still knows it. What is zero stays zero: a model in the shape of a larger one is
    the same model by its zeros."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return torch.where(tensor == 0, tensor, tensor + scale * tensor.float().std() * noise)

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


def changed(before: Iterable[dict[str, str]], after: Iterable[dict[str, str]]) -> set[str]:
    """Names of the parameters whose checksums differ on any rank."""
    return {name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name]}
