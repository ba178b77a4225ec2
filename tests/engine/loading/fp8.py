"""Targets in fp8 by blocks, in SGLang's own models: what of an update fits.

`python -m tests.engine.loading.fp8 FOLDER...`

Loaded, not run: the kernels want a GPU. In a process of its own, as SGLang's models expect.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.drafter.loading import begin
from tlt_server.config import ServerConfig
from tlt_server.engine.loading.schema import BLOCKS_LOADED, holds_as_published, schema_of, tensors_in
from tlt_server.launch import CPU_ENVIRONMENT

Tensors = dict[str, torch.Tensor]


def load(config: Any, tensors: Tensors) -> torch.nn.Module:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    how = LoadConfig()
    with set_default_torch_dtype(config.dtype):
        model: Any = _initialize_model(config, how, _get_quantization_config(config, how))
    model.load_weights(iter(tensors.items()))
    return model  # type: ignore[no-any-return]


def as_written(model: torch.nn.Module, tensors: Tensors) -> bool:
    """Whether weights and scales are where SGLang's kernels read them."""
    held = dict(model.named_parameters())
    layer = "model.layers.0.self_attn."
    pairs = []
    for end in ("weight", "weight_scale_inv"):
        fused = torch.cat([tensors[f"{layer}{name}_proj.{end}"].float() for name in "qkv"])
        pairs.append((held[f"{layer}qkv_proj.{end}"].float(), fused))
    assert held["lm_head.weight"].dtype == torch.bfloat16
    return all(torch.equal(*pair) for pair in pairs)


def check(model: torch.nn.Module, tensors: Tensors) -> None:
    from tlt_server.engine.weights.admission import TargetFit

    checked, tried = TargetFit(model, schema_of(tensors.items())), TargetFit(model, None)
    for name, tensor in tensors.items():
        assert checked.misfit(name, tensor) is None, name
        assert tried.misfit(name, tensor) is None, name
    assert checked.gaps(tensors.keys()) == []
    scale, name = "model.layers.1.mlp.down_proj.weight_scale_inv", "model.layers.0.self_attn.q_proj.weight"
    assert checked.gaps(tensors.keys() - {scale}) == [scale]
    assert "shape" in str(checked.misfit(scale, tensors[scale][:, :1]))
    why = checked.misfit(name, tensors[name].to(torch.bfloat16))
    assert why == "its dtype is torch.bfloat16, the model's is torch.float8_e4m3fn", why


def main(folders: list[Path]) -> None:
    args = begin(folders[0])
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    initialize_dp_attention(args, args.get_model_config())  # Qwen3's layers ask for it
    for folder in folders:
        config = ModelConfig.from_server_args(args, model_path=str(folder))
        assert holds_as_published(config)
        tensors = dict(tensors_in(sorted(folder.glob("*.safetensors"))))
        model, loads = load(config, tensors), config.hf_config.architectures[0] in BLOCKS_LOADED
        assert as_written(model, tensors) == loads, folder  # once SGLang's class loads its scales, it can be served
        if loads:
            check(model, tensors)


if __name__ == "__main__":
    os.environ |= CPU_ENVIRONMENT
    ServerConfig().to_environment()  # wakes the fork's seams
    main([Path(name) for name in sys.argv[1:]])
