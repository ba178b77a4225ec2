"""verl's rollout configuration as the command line of `tlt-server serve`."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode


def flags_of(config: RolloutConfig, model_config: HFModelConfig, mode: RolloutMode, gpu: int | None) -> list[str]:
    """What verl gives its own SGLang, under SGLang's names; `engine_kwargs.sglang` comes last and wins: flags of
    tlt-server too, as `drafter`, `arm` or `trainer`. gpu: the first one's index among those visible; None on a CPU."""
    settings: dict[str, Any] = {
        "model_path": model_config.local_path,
        "trust_remote_code": model_config.trust_remote_code,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "tp_size": config.tensor_model_parallel_size * config.data_parallel_size,
        "dp_size": config.data_parallel_size,
        "max_running_requests": config.max_num_seqs,
        "skip_tokenizer_init": config.skip_tokenizer_init,
        "skip_server_warmup": True,
        "enable_metrics": True,
    }
    if gpu is not None:
        settings |= {
            "base_gpu_id": gpu,
            "mem_fraction_static": config.gpu_memory_utilization,
            "disable_cuda_graph": config.enforce_eager,
            "attention_backend": "flashinfer",
            "enable_memory_saver": True,
            # verl takes the weights' memory back before it sends new ones into it
            "enable_weights_cpu_backup": mode != RolloutMode.STANDALONE,
        }
    return list(words(settings | dict(config.engine_kwargs.get("sglang") or {})))


def words(settings: Mapping[str, Any]) -> Iterator[str]:
    """`--name value` of each; a list gives one flag for each item, False and None give none."""
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                yield flag
            elif each is not None and each is not False:
                yield from (flag, str(each))
