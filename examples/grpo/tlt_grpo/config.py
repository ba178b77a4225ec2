"""The settings of a run, checked at the door."""

import math
from pathlib import Path
from typing import Literal

import msgspec

from tlt_grpo.errors import GrpoError

Scale = Literal["std", "none"]
Dtype = Literal["float32", "bfloat16"]
Route = Literal["disk", "tensor", "broadcast"]
Mode = Literal["on_policy", "one_step_off", "partial"]
Beside = Literal["learn", "publish"]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Same settings, same problems in the same order, and the same seeds for what a server samples."""

    url: str
    """Of the rollout server."""
    model: str
    """The policy at the start: a folder, or a name on the Hugging Face hub. The server must serve the same shape."""
    out: Path
    """For policy, log and state. By the route `disk` the server must see this folder under the same path."""
    steps: int = 10
    prompts: int = 8
    """Problems in a step."""
    group: int = 8
    """Responses to each."""
    max_new_tokens: int = 512
    """Of a response; one that is cut there is graded as it stands."""
    temperature: float = 1.0
    scale: Scale = "std"
    """Whether advantages are divided by the deviation of their group."""
    learning_rate: float = 1e-5
    updates: int = 1
    """Optimiser steps in a step, each on its share of the responses."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """The ratio of new to old probability counts between 1 - clip_low and 1 + clip_high."""
    truncate: float = 2.0
    """The weight of a token that the server's numerics thought less likely than the trainer's, at most."""
    kl: float | None = None
    """Weight of the KL from the start, in nats per token; 0: only measure it; None: keep no copy of the start."""
    all_responses: bool = False
    """Learn from groups of equal rewards too, whose advantages are 0: for a step that always costs the same."""
    batch_tokens: int = 8192
    """Tokens in one forward pass: what memory allows. Gradients of a step's passes add up to one update."""
    head_rows: int = 2048
    """Tokens whose logits are in memory at a time."""
    checkpointing: bool = False
    """Compute activations again in the backward pass: a third more time, and a fraction of the memory."""
    publish: Route = "disk"
    """`disk`: a checkpoint that the server reads. `tensor`: by memory of this machine, which server and trainer share:
    of the GPU (CUDA IPC), or of the host. `broadcast`: over NCCL to a server on other GPUs; from a CPU over gloo."""
    rollouts: Mode = "on_policy"
    """`one_step_off`: the next step's responses are sampled while a step learns. `partial`: as many are under way all
    the time, and a step takes the groups that end first. Publications then come between two tokens of a response."""
    max_age: int = 4
    """In publications: a token that was sampled by older weights is not learnt from."""
    offload: bool = False
    """The server's memory is released while the policy learns, where one GPU does not hold both."""
    drafter_trainer: str | None = None
    """URL of a drafter trainer with `on_demand`: in each step it trains."""
    drafter_beside: Beside = "publish"
    """What it trains beside: on another GPU than the policy's `learn`, which is then longer and costs nothing."""
    drafter_steps: int = 5
    """So many steps."""
    drafter_judged_every: int = 1
    """Steps of the policy: a judgement, which publishes what is better before the policy is, takes as long as several
    of the drafter's."""
    checkpoint_every: int = 10
    """Steps from one state, that a run can be resumed from, to the next; the last step leaves one as well."""
    held_out: int = 0
    """Problems, kept out of training, that are answered once each before the first step and after the last."""
    device: str = "cpu"
    dtype: Dtype | None = None
    """Of weights that compute and are published; None: bfloat16 on a GPU, else float32. The optimiser's are float32."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "max_new_tokens", "updates", "batch_tokens", "head_rows", "checkpoint_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("drafter_steps", "drafter_judged_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("max_age", self.max_age >= 0, "at least 0")
        on_policy = self.rollouts == "on_policy"
        self._require("offload", on_policy or not self.offload, "false: a server that samples keeps its memory")
        self._require("group", self.group >= 2, "at least 2: an advantage compares the responses to one problem")
        self._require("held_out", self.held_out >= 0, "at least 0")
        for name in ("temperature", "learning_rate", "clip_high", "truncate"):
            self._require(name, 0 < getattr(self, name) < math.inf, "above 0")
        self._require("clip_low", 0 < self.clip_low < 1, "between 0 and 1")
        self._require("kl", self.kl is None or 0 <= self.kl < math.inf, "at least 0")
        self._require("updates", self.updates <= self.prompts * self.group, "at most the number of responses")

    @property
    def weights(self) -> Dtype:
        """The dtype that was chosen."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise GrpoError(f"{name}={getattr(self, name)}: must be {what}")
