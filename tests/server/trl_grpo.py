"""TRL's own GRPOTrainer in server mode, on a CPU, against a server that speaks vLLM's dialect.

    python -m tests.server.trl_grpo URL OUT.json [STEPS]    the trained model lies beside, in `final`

What is not TRL's: the stand-in for vLLM, whose weight transfer goes by gloo, and that TRL is told to have a GPU where
it asks for one before the transfer.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlt_server.demo import default_paths
from tlt_server.demo.task import Problem, grade, problems
from tlt_server.engine.cpu.torchvision import mend_torchvision

TARGET, _ = default_paths()


def main(url: str, out: Path, steps: int) -> None:
    mend_torchvision()  # TRL's imports need it
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from vllm.utils.network_utils import get_open_port

    sampled: list[dict[str, Any]] = []
    joined, posted = VLLMClient.init_communicator, VLLMClient._post
    VLLMClient.init_communicator = lambda self, **_: joined(self, device=torch.device("cuda"))

    def post(self: VLLMClient, url: str, **call: Any) -> Any:
        answer = posted(self, url, **call)
        for choice in answer.get("choices", ()):
            sampled.append({"step": trainer.state.global_step, "versions": choice["weight_versions"]})
        return answer

    VLLMClient._post = post
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(TARGET),
        reward_funcs=right,
        train_dataset=Dataset.from_list([{"prompt": p.prompt} | asdict(p) for p in problems(64, seed=1)]),
        args=GRPOConfig(
            output_dir=str(out.parent / "trl"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_group_port=get_open_port(),
            generation_kwargs={"return_weight_versions": True},
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=96,
            max_steps=steps,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            seed=3,
        ),
    )
    trainer.train()
    trainer.vllm_generation.sync_weights()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    trainer.model.save_pretrained(out.parent / "final")
    out.write_text(json.dumps({"steps": trainer.state.global_step, "losses": losses, "sampled": sampled}))


def right(completions: list[str], left: list[int], right: list[int], **_: Any) -> list[float]:
    """1 for a right answer, and a little for each character of work, so that advantages are never all 0."""
    graded = zip(completions, left, right, strict=True)
    return [grade(Problem(a, b), text) + len(text) / 1000 for text, a, b in graded]


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 5)
