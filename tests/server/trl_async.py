"""TRL's own rollout worker and weight transfer of AsyncGRPO, on a CPU, against a server that speaks vLLM's dialect.

    python -m tests.server.trl_async URL OUT.json [STEPS]    what was sent last lies beside, in `final`

Its trainer needs a GPU's attention kernel: what it would do around them is done here, with other weights in each step.
While they are sent, the worker's requests run.
"""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.engine.cpu.torchvision import mend_torchvision

mend_torchvision()  # TRL's imports need it, in the worker's process too
TARGET, _ = default_paths()
CONTENT = {"role": {"const": "assistant"}, "content": {"type": "string"}}
EACH = 12
"""Samples that are read before the weights change."""


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(each))) for each in completions]


def main(url: str, out: Path, steps: int) -> None:
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    PartialState()  # TRL's logger asks which process this is
    logging.basicConfig(level=logging.WARNING)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_schema = {"x-regex": r"(?P<content>[\s\S]*)", "type": "object", "properties": CONTENT}
    weights = dict(model.named_parameters())
    transfer = WeightTransferClient(
        VLLMClient(url),
        {
            "names": list(weights),
            "dtype_names": [str(each.dtype).split(".")[-1] for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        },
    )
    worker = AsyncRolloutWorker(
        model_name=str(TARGET),
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": p.prompt}]} for p in problems(16, seed=1)]),
        reward_funcs=[length],
        processing_class=tokenizer,
        eos_token_ids=[model.generation_config.eos_token_id],
        num_generations=2,
        max_inflight_tasks=8,
        vllm_server_url=url,
        max_tokens=48,
    )
    transfer.init_weight_transfer()
    found: dict[str, Any] = {"steps": 0, "mismatches": []}
    try:
        for step in range(steps):
            transfer.pause()
            transfer.send_weights(iter(list(weights.items())))
            transfer.resume()
            worker.update_model_version(step)
            if step == 0:
                worker.start()
            for sample in taken(worker, step):
                found["mismatches"].append(float(mismatch(model, sample)))
            found["steps"] += 1
            if step + 1 < steps:
                move(weights, step)
    finally:
        worker.stop()
        transfer.destroy()
    model.save_pretrained(out.parent / "final")
    out.write_text(json.dumps(found))


def taken(worker: Any, version: int) -> Iterator[Any]:
    """Samples that this version made by itself: those that began before it are read and passed over."""
    count = 0
    while count < EACH:
        sample = worker.rollout_buffer.get(timeout=120)
        if sample.model_version == version:
            count += 1
            yield sample


def mismatch(model: Any, sample: Any) -> float:
    """The greatest difference, in nats, between a token's logprob as sampled and by the model that was sent."""
    ids = torch.tensor(sample.input_ids)[None]
    with torch.no_grad():
        expected = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    sampled = [i for i, of_the_model in enumerate(sample.completion_mask) if of_the_model]
    return max(abs(float(expected[i - 1]) - sample.old_log_probs[i]) for i in sampled)


def move(weights: dict[str, torch.Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        if weight.dim() > 1:
            weight.data += 0.02 * weight.std() * torch.randn(weight.shape, generator=draw)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 3)
