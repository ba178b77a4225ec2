"""What verl asks of a server's Ray actor, asked of tlt-server over HTTP."""

import logging
import os
from typing import Any, TypedDict

from tlt_client import Aborted, AsyncClient, Rollout, SamplingParams
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

logger = logging.getLogger(__name__)

MEMORY_S = 600.0
"""How long memory may take to be given back or taken again, and a publication to be closed."""


class Bridge:
    """A Ray actor that verl calls in place of its own SGLang server; subclasses open `client`.

    Raises ValueError: the configuration asks for what tlt-server does not do, or what this bridge does not pass on.
    """

    client: AsyncClient

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, rollout_mode: RolloutMode) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.rollout_mode = rollout_mode
        self.global_steps: int | None = None
        self.max_model_len = max_model_len(self.config, self.model_config)
        refuse(self.config, self.model_config)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
    ) -> TokenOutput:
        """One rollout. What an abort ended, begun or not, has the stop reason `abort`: verl goes on from there.

        Raises ValueError: the prompt leaves no room, or holds what is not text. Errors of tlt_client: no rollout came.
        """
        if image_data or video_data:
            raise ValueError("image_data, video_data: tlt-server speculates for text alone")
        sampling, logprobs = self._sampling(dict(sampling_params), len(prompt_ids))
        try:
            rollout = await self.client.generate(prompt_ids, sampling, rid=request_id, logprobs=logprobs)
        except Aborted:
            return TokenOutput(
                token_ids=[],
                log_probs=[] if logprobs else None,
                stop_reason="abort",
                extra_fields={"global_steps": self.global_steps},
            )
        return token_output(rollout)

    def _sampling(self, asked: dict[str, Any], prompt: int) -> tuple[SamplingParams, bool]:
        """In SGLang's names, with as many tokens as there is room for, and whether logprobs are wanted."""
        room = self.max_model_len - prompt - 1
        if room < 0:
            raise ValueError(f"a prompt of {prompt} tokens leaves no room: max_model_len is {self.max_model_len}")
        if asked.pop("prompt_logprobs", None) is not None:
            raise ValueError("prompt_logprobs: this bridge serves policies, let verl's own SGLang serve the teacher")
        limits = [asked.pop(name) for name in ("max_new_tokens", "max_tokens") if name in asked]
        given = self.config.prompt_length + self.config.response_length - prompt
        limit = limits[0] if limits else min(self.config.response_length, given)
        logprobs = asked.pop("logprobs", False) not in (False, None)
        return SamplingParams(**asked, max_new_tokens=max(0, min(limit, room))), logprobs

    # -- weights --

    async def set_global_steps(self, global_steps: int) -> None:
        """Names the weights that verl has just sent, so that every response says which ones sampled it."""
        await self.client.update_weight_version(str(global_steps))
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """What runs comes back as it is; what comes from now on waits for `resume_generation`."""
        if reject_request:
            logger.warning("reject_request=True is not heeded: requests wait until generation is resumed")
        await self.client.pause_generation("abort")

    async def resume_generation(self) -> None:
        await self.client.continue_generation()

    # -- memory --

    async def sleep(self) -> None:
        await self._release(self._tags())

    async def wake_up(self) -> None:
        await self._resume(self._tags())

    async def release_kv_cache(self) -> None:
        await self._release(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        await self._resume(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        await self.client.flush_cache()

    def _tags(self) -> list[str]:
        """A server with GPUs of its own keeps its weights."""
        return ["kv_cache"] if self.rollout_mode == RolloutMode.STANDALONE else ["kv_cache", "weights"]

    async def _release(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self.client.release_memory_occupation(tags)

    async def _resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self.client.resume_memory_occupation(tags)
            await self.client.flush_cache()

    # -- profiles --

    async def start_profile(self, **_: Any) -> None:
        logger.warning("verl's profiler does not reach tlt-server: use its own route /start_profile")

    async def stop_profile(self) -> None:
        pass


def max_model_len(config: RolloutConfig, model_config: HFModelConfig) -> int:
    """Tokens that prompt and response may have together. ValueError: more than the model has positions."""
    most = get_max_position_embeddings(model_config.hf_config)
    if (config.max_model_len or 0) > most:
        raise ValueError(f"rollout.max_model_len={config.max_model_len}: the model has {most} positions")
    return int(config.max_model_len or most)


def refuse(config: RolloutConfig, model_config: HFModelConfig) -> None:
    """Raises ValueError: settings that would be dropped in silence, each with what to do."""
    faults = {
        "rollout.mtp.enable_rollout: tlt-server has drafters of its own, engine_kwargs.sglang.drafter": (
            config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout
        ),
        "rollout.quantization: tlt-server does not speculate with a quantized target": config.quantization,
        "rollout.enable_rollout_routing_replay: tlt-server speculates for dense models": (
            config.enable_rollout_routing_replay
        ),
        "model.lora_rank: set model.lora.merge=True, a drafter does not follow an adapter": (
            model_config.lora_rank > 0 and not model_config.lora.get("merge", False)
        ),
    }
    if found := [fault for fault, there in faults.items() if there]:
        raise ValueError("; ".join(found))


def token_output(rollout: Rollout) -> TokenOutput:
    """As verl reads it; a rollout that several versions sampled has the first and the last of them."""
    steps = [step_of(span.version) for span in rollout.weight_versions] or [step_of(rollout.weight_version)]
    extra: dict[str, Any] = {
        "global_steps": steps[-1],
        "min_global_steps": steps[0],
        "max_global_steps": steps[-1],
        "num_cached_tokens": rollout.cached_tokens,
    }
    return TokenOutput(
        token_ids=list(rollout.tokens),
        log_probs=None if rollout.logprobs is None else list(rollout.logprobs),
        stop_reason=rollout.finish_reason.type,
        extra_fields=extra,
    )


def step_of(weight_version: str | None) -> int | None:
    """The trainer's step that a version names; None for the weights that the server started with."""
    return int(weight_version) if weight_version and weight_version.isdigit() else None


class Keys(TypedDict):
    """Of a server, for its clients."""

    api_key: str | None
    admin_key: str | None


def keys() -> Keys:
    """From the environment: verl logs its configuration."""
    return {"api_key": os.environ.get("TLT_API_KEY"), "admin_key": os.environ.get("TLT_ADMIN_API_KEY")}
