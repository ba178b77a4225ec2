"""The embedded target and its drafters in the shape of a larger model: the same function, at the larger one's cost.

    python -m benchmarks.models.shapes qwen2.5-7b FOLDER

writes FOLDER/target, FOLDER/drafter (EAGLE) and FOLDER/drafter_eagle3. A benchmark needs no download then, and what it
drafts and accepts is real, on problems of the embedded task. How it is done stands in padding.py.
"""

import argparse
import hashlib
import inspect
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.models import blocks
from benchmarks.models.padding import Padding, real_layers
from benchmarks.models.workloads import MODELS, WORKLOADS, Workload
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.training import model
from tlt_server.errors import ConfigError
from tlt_server.launch import has_gpu

SHARD_BYTES = 1 << 30
"""Of a weight file at most, if one weight is not larger."""
RECIPE = "recipe.json"
BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files of a target, beside its weights."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Recipe = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape(model.Shape):
    """Sizes of a model with Llama's layers.

    Qwen2's are Llama's with biases (here zero) at query, key and value, and so they are written, as Llama with
    `attention_bias`, which has one at the output too: to the model type qwen2 transformers gives Qwen2's pre-tokenizer,
    whatever the tokenizer.json beside it says. In fp8 they are Qwen2's all the same (blocks.py). The rotary base is the
    embedded target's, which costs the same; the head is never tied to the embedding, as it is in the real 1.5B. `eps`
    follows from the sizes.
    """

    bias: bool
    context: int = 32_768


SHAPES = {
    # for a CPU: 48 million parameters
    "50m": Shape(bias=True, vocab=8_192, hidden=512, layers=8, heads=8, kv_heads=2, mlp=2_816),
    # for what a GPU is asked often: heads that its attention kernels know, and no layer or unit that only costs time
    "18m": Shape(bias=False, vocab=8_192, hidden=512, layers=4, heads=8, kv_heads=2, head_dim=128, mlp=768),
    "qwen2.5-1.5b": Shape(
        bias=True, vocab=151_936, hidden=1_536, layers=28, heads=12, kv_heads=2, head_dim=128, mlp=8_960
    ),
    "qwen2.5-7b": Shape(
        bias=True, vocab=152_064, hidden=3_584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp=18_944
    ),
    "qwen2.5-32b": Shape(
        bias=True, vocab=152_064, hidden=5_120, layers=64, heads=40, kv_heads=8, head_dim=128, mlp=27_648
    ),
    "llama-3-8b": Shape(
        bias=False, vocab=128_256, hidden=4_096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336
    ),
}


@dataclass(frozen=True)
class Built:
    """Where the checkpoints lie."""

    target: Path
    drafter: Path
    drafter_eagle3: Path


def build(
    shape: str | Shape,
    folder: Path,
    *,
    workload: Workload = WORKLOADS["demo"],
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    seed: int = 0,
    names: Sequence[str] = MODELS,
    fp8: bool = False,
) -> Built:
    """Writes target and drafters to `folder`, or finds there what an equal call has written.

    They are written beside it and moved there when whole. Memory holds two of the files of 1 GiB at a time.

    shape: a name in SHAPES, or sizes that the embedded models fit into. workload: whose models. dtype: of all weights.
    device: where random numbers are drawn, which differ between a GPU and a CPU; a GPU if there is one. seed: of what
    is random. names: of those that are written, of MODELS. fp8: the target's layers are quantized (blocks.py), a
    drafter's never. ConfigError: an unknown name, sizes too small, something else in `folder`, or too little space on
    its disk.
    """
    shape = shape if isinstance(shape, Shape) else _named(shape)
    embedded = {name: workload.models / name for name in MODELS}
    small = load_target(embedded["target"]).shape
    _check_fits(small, shape)
    built = Built(**{name: folder / name for name in MODELS})
    recipe = {"shape": asdict(shape), "dtype": str(dtype), "seed": seed, "sources": _digest(workload)}
    recipe |= {"models": list(names), "fp8": fp8}
    if folder.exists():
        _check_same(folder, recipe)
        return built
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted = {name: embedded[name] for name in names}
    _check_space(folder, wanted.values(), shape, Padding(small, shape, dtype, "meta", seed))
    padding = Padding(small, shape, dtype, device or ("cuda" if has_gpu() else "cpu"), seed)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        whole = Path(scratch) / "whole"
        for name, source in wanted.items():
            config, weights = _config(source, shape, padding, dtype), _weights(source, shape, padding)
            if fp8 and name == "target":
                config, weights = config | blocks.CONFIG, blocks.in_blocks(weights)
            _write(whole / name, config, weights)
        if "target" in wanted:
            for file in BESIDE:
                shutil.copyfile(embedded["target"] / file, whole / "target" / file)
        (whole / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
        whole.rename(folder)
    return built


def _named(shape: str) -> Shape:
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape}: not known. Choose one of {', '.join(SHAPES)}")
    return SHAPES[shape]


def _check_fits(small: model.Shape, large: Shape) -> None:
    wanted = {
        f"vocab of {small.vocab}": large.vocab >= small.vocab,
        f"hidden size of {small.hidden}, and room for more": large.hidden > small.hidden,
        f"{small.layers} layers": large.layers >= small.layers,
        f"{small.kv_heads} key heads": large.kv_heads >= small.kv_heads,
        f"{small.heads // small.kv_heads} query heads to a key head": large.heads % large.kv_heads == 0
        and large.heads // large.kv_heads >= small.heads // small.kv_heads,
        f"head_dim of {small.head_dim} a whole number of times": large.head_dim % small.head_dim == 0,
        f"{small.mlp} units": large.mlp >= small.mlp,
    }
    missing = [name for name, fits in wanted.items() if not fits]
    if missing:
        raise ConfigError(f"{large}: has no room for the embedded target's {'; '.join(missing)}. Enlarge it")


def _check_same(folder: Path, recipe: Recipe) -> None:
    path = folder / RECIPE
    if not path.is_file() or json.loads(path.read_text()) != recipe:
        raise ConfigError(f"{folder}: exists and is not this model. Remove it, or name another folder")


def _check_space(folder: Path, sources: Iterable[Path], shape: Shape, padding: Padding) -> None:
    needed = sum(weight.nbytes for source in sources for _, weight in _weights(source, shape, padding))
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise ConfigError(f"{folder}: {needed:,} bytes needed, {free:,} free. Name a folder on a larger disk")


def _digest(workload: Workload) -> str:
    """Of all that decides what is written: this code and the embedded models."""
    embedded = [file for name in MODELS for file in sorted((workload.models / name).iterdir())]
    files = [Path(__file__), Path(inspect.getfile(Padding)), *embedded]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _has_bias(name: str, shape: Shape) -> bool:
    return shape.bias and name != "drafter_eagle3"  # SGLang's has none at query, key and value


def _weights(source: Path, shape: Shape, padding: Padding) -> Iterator[tuple[str, Tensor]]:
    small = {key: weight.float() for key, weight in load_file(source / "model.safetensors").items()}
    for key, weight in padding.target(small) if source.name == "target" else padding.drafter(small):
        yield key, weight
        if _has_bias(source.name, shape) and ".self_attn." in key:
            yield key.replace("weight", "bias"), weight.new_zeros(len(weight))


def _config(source: Path, shape: Shape, padding: Padding, dtype: torch.dtype) -> dict[str, Any]:
    name, config = source.name, dict[str, Any](json.loads((source / "config.json").read_text()))
    config |= {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": padding.large.eps,
        "attention_bias": _has_bias(name, shape),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if name == "target":
        config["num_hidden_layers"] = shape.layers
    if name == "drafter_eagle3":
        key, real = "eagle_aux_hidden_state_layer_ids", real_layers(padding.small.layers, shape.layers)
        config["eagle_config"] = {key: [real[layer] for layer in config["eagle_config"][key]]}
    return config


def _write(folder: Path, config: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(weights), 1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
        total += sum(weight.nbytes for weight in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, weight in weights:
        if shard and sum(each.nbytes for each in shard.values()) + weight.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = weight.cpu()
    yield shard


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.shapes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--workload", choices=WORKLOADS, default="demo")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        build(
            arguments.shape,
            arguments.folder,
            workload=WORKLOADS[arguments.workload],
            dtype=DTYPES[arguments.dtype],
            seed=arguments.seed,
        )
    except (ConfigError, OSError) as error:
        parser.exit(ConfigError.exit_code, f"{error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
