"""Loads drafters as SGLang does, in a process of its own: `python -m tests.drafter.loading [--stock] FOLDER...`.

Writes what each model then holds to FOLDER/loaded.safetensors, under its own names; d2t's tokens are `hot_token_id`.
--stock: by the SGLang on PYTHONPATH as it is, with no seam of ours; says where it lies.
"""

import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tlt_server.config import ServerConfig
from tlt_server.engine.cpu.install import install
from tlt_server.launch import CPU_ENVIRONMENT


def begin(folder: Path) -> Any:
    """What SGLang's models expect of their process; returns its settings."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(str(folder), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True)
    runtime_context.publish(args, role="test")
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    initialize_model_parallel()
    return args


def load(args: Any, folder: Path) -> Any:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    config = ModelConfig.from_server_args(args, model_path=str(folder), is_draft_model=True)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def main(folders: list[Path]) -> None:
    args = begin(folders[0])
    for folder in folders:
        model = load(args, folder)
        held = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        if getattr(model, "hot_token_id", None) is not None:
            held["hot_token_id"] = model.hot_token_id
        save_file(held, folder / "loaded.safetensors")


if __name__ == "__main__":
    os.environ |= CPU_ENVIRONMENT
    names = sys.argv[1:]
    if names[0] == "--stock":
        install()  # stands in for sgl_kernel, which no machine without a GPU has
        import sglang

        sys.stdout.write(f"{sglang.__file__}\n")
        names = names[1:]
    else:
        ServerConfig().to_environment()  # wakes the fork's seams
    main([Path(name) for name in names])
