"""SkyRL's own inference client, on a CPU, against a server that speaks vLLM's dialect.

    python -m tests.server.skyrl_steps URL OUT.json [STEPS]    what was sent last lies beside, in `final`

Its trainer needs Ray and GPUs: around its client stands what its broadcast strategy does.
"""

import asyncio
import json
import sys
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.trl_async import move
from tests.server.vllm_stand_in.vllm.distributed.weight_transfer.nccl_common import trainer_init
from tests.server.vllm_stand_in.vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.process import free_port

TARGET, _ = default_paths()
SAMPLED = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 48}
SAMPLED |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None}


@dataclass
class Group:
    """Where SkyRL's rank 0 listens, as its `BroadcastInitInfo` says it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list["Group"]:
        assert (num_servers, dp_size) == (1, 1)
        return [self]

    def to_api_payload(self) -> dict[str, Any]:
        return asdict(self)


async def main(url: str, out: Path, steps: int) -> None:
    typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses SkyRL's otherwise before Python 3.12
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    weights = dict(model.named_parameters())
    found: dict[str, Any] = {"steps": 0, "mismatches": []}
    async with RemoteInferenceClient(url, [url], data_parallel_size=1, model_name=str(TARGET)) as client:
        total, _ = await client.get_world_size()
        group = Group("127.0.0.1", free_port(), 1, total + 1)
        joined = asyncio.create_task(client.init_weight_update_communicator(group))
        sender = await asyncio.to_thread(trainer_init, asdict(group))
        await joined
        prompts = [tokenizer.encode(problem.prompt) for problem in problems(8, seed=2)]
        for step in range(steps):
            running = asyncio.create_task(rollouts(client, prompts)) if step else None
            await client.pause()
            await client.reset_prefix_cache(reset_running_requests=True)
            await publish(client, sender, weights)
            await client.resume()
            client.increment_weight_version()
            if running:
                await running  # of the weights before and of these
            answers = await rollouts(client, prompts)
            for prompt, ids, logprobs in zip(
                prompts, answers["response_ids"], answers["response_logprobs"], strict=True
            ):
                assert tokenizer.decode(ids) in answers["responses"]
                found["mismatches"].append(mismatch(model, prompt, ids, logprobs))
            found["steps"] += 1
            if step + 1 < steps:
                move(weights, step)
    model.save_pretrained(out.parent / "final")
    out.write_text(json.dumps(found))


async def rollouts(client: Any, prompts: list[list[int]]) -> Any:
    asked = {"prompt_token_ids": prompts, "sampling_params": SAMPLED, "cache_salt": str(client.weight_version)}
    return await client.generate(asked | {"session_ids": [f"s{i}" for i in range(len(prompts))]})


async def publish(client: Any, sender: Any, weights: dict[str, torch.Tensor]) -> None:
    info = {
        "names": list(weights),
        "dtype_names": [str(each.dtype).split(".")[-1] for each in weights.values()],
        "shapes": [list(each.shape) for each in weights.values()],
        "packed": True,
    }
    await client.start_weight_update(is_checkpoint_format=True)
    receiving = asyncio.create_task(client.update_weights_nccl(info))
    await asyncio.to_thread(packed_nccl_broadcast_producer, iter(weights.values()), sender, 0, lambda tensor: tensor)
    await receiving
    await client.finish_weight_update()


def mismatch(model: Any, prompt: list[int], ids: list[int], logprobs: list[float]) -> float:
    """The greatest difference, in nats, between a token's logprob as sampled and by the model that was sent."""
    assert len(ids) == len(logprobs)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return float((expected - torch.tensor(logprobs)).abs().max())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 3))
