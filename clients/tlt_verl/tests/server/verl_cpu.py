"""verl's own classes in this process, on a machine without a GPU, and what the tests ask of them."""

import asyncio
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

HERE = Path(__file__).parent
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import cpu_workers  # noqa: E402

with warnings.catch_warnings(), patch.dict(os.environ):  # other tests' processes inherit what this one has
    warnings.simplefilter("ignore")
    cpu_workers.prepare()
    import ray  # noqa: F401
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager  # noqa: F401

    import tlt_verl  # noqa: F401

from tlt_server.demo import default_paths  # noqa: E402

TARGET, _ = default_paths()
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
PROMPT = [22, 26, 14, 5, 31]


def configured(*overrides: str) -> Any:
    """verl's own configuration of a PPO run, with these overrides of the rollout."""
    with warnings.catch_warnings(), initialize_config_module("verl.trainer.config", version_base=None):
        warnings.simplefilter("ignore")
        common = ["tensor_model_parallel_size=1", "dtype=float32", "prompt_length=64", "response_length=600"]
        return compose(
            "ppo_trainer",
            [f"actor_rollout_ref.model.path={TARGET}"]
            + [f"++actor_rollout_ref.rollout.{each}" for each in (*common, *overrides)],
        )


def parts(config: Any) -> tuple[Any, Any]:
    """Of the rollout and of the model, as verl's workers have them."""
    of = config.actor_rollout_ref
    return omega_conf_to_dataclass(of.rollout), omega_conf_to_dataclass(of.model)


class Started(NamedTuple):
    """What verl made of `rollout.name=sglang`."""

    manager: Any
    worker: Any
    client: Any

    @property
    def url(self) -> str:
        return f"http://{self.manager.server_addresses[0]}"

    def generate(self, **sampling: Any) -> Any:
        """A greedy rollout, by verl's client, as a coroutine."""
        return self.client.generate("any", prompt_ids=PROMPT, sampling_params=GREEDY | sampling)


def run(*coroutines: Any) -> list[Any]:
    """Together, within a time: the first call of an actor that Ray starts waits until it has imported verl."""

    async def both() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*coroutines), 300)

    return asyncio.run(both())
