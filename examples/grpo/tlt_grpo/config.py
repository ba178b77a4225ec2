"""The settings of a run, checked at the door."""

import math
from pathlib import Path
from typing import Literal

import msgspec

from tlt_grpo.errors import GrpoError

Scale = Literal["std", "none"]
Dtype = Literal["float32", "bfloat16"]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Same settings, same problems in the same order; what a server samples is its own affair."""

    url: str
    """Of the rollout server."""
    model: str
    """The policy at the start: a folder, or a name on the Hugging Face hub. The server must serve the same shape."""
    out: Path
    """Where the policy is published and the log is written. The server must see this folder under the same path."""
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
    kl: float | None = None
    """Weight of the KL from the start, in nats per token; 0: only measure it; None: keep no copy of the start."""
    batch_tokens: int = 8192
    """Tokens in one forward pass, padding included: what memory allows."""
    held_out: int = 0
    """Problems, kept out of training, that are answered once each before the first step and after the last."""
    device: str = "cpu"
    dtype: Dtype = "float32"
    """Of the sums, and of what is published; the weights that learn are kept in float32."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "max_new_tokens", "updates", "batch_tokens"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("group", self.group >= 2, "at least 2: an advantage compares the responses to one problem")
        self._require("held_out", self.held_out >= 0, "at least 0")
        for name in ("temperature", "learning_rate", "clip_high"):
            self._require(name, 0 < getattr(self, name) < math.inf, "above 0")
        self._require("clip_low", 0 < self.clip_low < 1, "between 0 and 1")
        self._require("kl", self.kl is None or 0 <= self.kl < math.inf, "at least 0")
        self._require("updates", self.updates <= self.prompts * self.group, "at most the number of responses")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise GrpoError(f"{name}={getattr(self, name)}: must be {what}")
