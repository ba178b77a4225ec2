"""A target in fp8 by blocks, in SGLang's own model: what of an update fits. `python -m tests.engine.loading.fp8 FOLDER`

Loaded, not run: its kernels want a GPU. In a process of its own, as SGLang's models expect.
"""

import os
import sys
from pathlib import Path

import torch

from tests.drafter.loading import begin
from tlt_server.config import ServerConfig
from tlt_server.engine.loading.schema import BLOCKS_LOADED, holds_as_published, schema_of, tensors_in
from tlt_server.launch import CPU_ENVIRONMENT


def main(folder: Path) -> None:
    args = begin(folder)
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from tlt_server.engine.weights.admission import TargetFit

    config, how = ModelConfig.from_server_args(args), LoadConfig()
    initialize_dp_attention(args, config)  # Qwen3's layers ask for it
    assert holds_as_published(config)
    with set_default_torch_dtype(config.dtype):
        model = _initialize_model(config, how, _get_quantization_config(config, how))
    tensors = dict(tensors_in(sorted(folder.glob("*.safetensors"))))
    model.load_weights(iter(tensors.items()))
    if config.hf_config.architectures[0] not in BLOCKS_LOADED:
        sys.exit(int(scales_lie(model, tensors)))
    assert scales_lie(model, tensors)
    checked, tried = TargetFit(model, schema_of(tensors.items())), TargetFit(model, None)
    for name, tensor in tensors.items():
        assert checked.misfit(name, tensor) is None, name
        assert tried.misfit(name, tensor) is None, name
    assert checked.gaps(tensors.keys()) == []
    scale = "model.layers.1.mlp.down_proj.weight_scale_inv"
    assert checked.gaps(tensors.keys() - {scale}) == [scale]
    name = "model.layers.0.self_attn.q_proj.weight"
    why = checked.misfit(name, tensors[name].to(torch.bfloat16))
    assert why == "its dtype is torch.bfloat16, the model's is torch.float8_e4m3fn", why
    assert "shape" in str(checked.misfit(scale, tensors[scale][:, :1]))


def scales_lie(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether weights and scales are where SGLang's kernels read them, as they were written."""
    held = dict(model.named_parameters())
    layer = "model.layers.0.self_attn."
    pairs = []
    for end in ("weight", "weight_scale_inv"):
        fused = torch.cat([tensors[f"{layer}{name}_proj.{end}"].float() for name in "qkv"])
        pairs.append((held[f"{layer}qkv_proj.{end}"].float(), fused))
    assert held["lm_head.weight"].dtype == torch.bfloat16
    return all(torch.equal(*pair) for pair in pairs)


if __name__ == "__main__":
    os.environ |= CPU_ENVIRONMENT
    ServerConfig().to_environment()  # wakes the fork's seams
    main(Path(sys.argv[1]))
