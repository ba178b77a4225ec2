"""TRL's GRPOTrainer with rollouts from a tlt-server: a `rollout_func` over tlt-client, and nothing else of ours.

    python -m examples.trl.trl_grpo --url http://127.0.0.1:30000 --model MODEL --out FOLDER

Server and trainer share a machine: weights go by its memory, from a GPU by CUDA IPC. `rollout_func` is experimental in
TRL (1.16); without its own vLLM TRL corrects for no difference between the sampler's numerics and its own, so let each
batch be learnt from once.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from msgspec.structs import replace
from tlt_client import Client, SamplingParams, sample_seed

from tlt_server.demo.task import Problem, grade, training_problems
from tlt_server.engine.cpu.torchvision import mend_torchvision

mend_torchvision()  # transformers imports it
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Rollouts:
    """What TRL calls for responses: by the weights as they are then, which the server is sent if it lacks them."""

    def __init__(self, client: Client, max_new_tokens: int, seed: int) -> None:
        self._client, self._seed, self._published = client, seed, -1
        # nothing cut off the policy's own law, or the logprobs would be another's
        self._params = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, max_new_tokens=max_new_tokens
        )

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
        """A response to each prompt, which TRL has repeated as often as a group is large."""
        version = f"trl {trainer.state.global_step}"
        if trainer.state.global_step != self._published:
            self._publish(trainer.accelerator.unwrap_model(trainer.model), version)
            self._published = trainer.state.global_step
        params = replace(self._params, sampling_seed=sample_seed(self._seed, trainer.state.global_step))
        asked = trainer.processing_class(list(prompts))["input_ids"]
        rollouts = self._client.generate_batch(asked, params, logprobs=True, version=version)
        return {
            "prompt_ids": asked,
            "completion_ids": [list(each.tokens) for each in rollouts],
            "logprobs": [list(each.logprobs or ()) for each in rollouts],
        }

    def _publish(self, model: torch.nn.Module, version: str) -> None:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        self._client.begin_weight_update()
        self._client.update_weights_from_tensor(weights, version)
        self._client.end_weight_update()


def right(completions: Sequence[str], left: Sequence[int], right: Sequence[int], **_: Any) -> list[float]:
    """The reward: 1 for the right product."""
    return [float(grade(Problem(*pair), text)) for text, *pair in zip(completions, left, right, strict=True)]


def main(
    url: Annotated[str, typer.Option(help="Of the rollout server.")],
    model: Annotated[str, typer.Option(help="What it serves: folder or hub name.")],
    out: Annotated[Path, typer.Option(help="For the trained model.")],
    steps: Annotated[int, typer.Option(help="Updates.")] = 10,
    group: Annotated[int, typer.Option(help="Responses to a problem.")] = 8,
    prompts: Annotated[int, typer.Option(help="Problems in a step.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Of a response.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="AdamW's.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Of what is sampled: the same one, and the run is the same.")] = 0,
) -> None:
    """Train a policy on the embedded task."""
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = GRPOConfig(
        output_dir=str(out / "trl"), max_steps=steps, per_device_train_batch_size=prompts * group,
        num_generations=group, max_completion_length=max_new_tokens, learning_rate=learning_rate, logging_steps=1,
        save_strategy="no", report_to=[], bf16=on_gpu, use_cpu=not on_gpu,
    )  # fmt: skip
    with Client(url) as client:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=right,
            train_dataset=Dataset.from_list(
                [{"prompt": each.prompt} | asdict(each) for each in training_problems(steps * prompts, seed=0)]
            ),
            rollout_func=Rollouts(client, max_new_tokens, seed),
            args=settings,
        )
        trainer.train()
    trainer.save_model(str(out))
    for line in trainer.state.log_history:
        if "reward" in line:
            typer.echo(f"step {line['step']}: reward {line['reward']:.3f}")


if __name__ == "__main__":
    typer.run(main)
