"""What is trained: a drafter of some shape with fresh weights, on rollouts of the task's lengths and random contents.

What is computed does not depend on the numbers, so none has to be made by a target of that shape.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from benchmarks.lib.command import EMBEDDED, SEED
from benchmarks.lib.training.lengths import Length
from benchmarks.models.shapes import SHAPES
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.drafter.config import ModelConfig, drafter_config
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.losses import EAGLE
from tlt_server.trainer.learn.network import network
from tlt_server.trainer.learn.packing import Run


def config_of(shape: str) -> Mapping[str, Any]:
    """The config.json of the EAGLE drafter of a target of that shape.

    Raises:
        ConfigError: not known.
    """
    if shape == EMBEDDED:
        return read_config(default_paths()[1])
    if (sizes := SHAPES.get(shape)) is None:
        raise ConfigError(f"--shape {shape}: not known. Choose one of {', '.join((EMBEDDED, *SHAPES))}")
    target = ModelConfig(
        architectures=("Qwen2ForCausalLM" if sizes.bias else "LlamaForCausalLM",),
        model_type="qwen2" if sizes.bias else "llama",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context,
        rms_norm_eps=sizes.eps,
    )
    return msgspec.json.decode(drafter_config(target, DrafterKind.EAGLE).to_json(), type=dict[str, Any])


@dataclass(frozen=True)
class Job:
    """A drafter to train. config: its config.json. budget: entries of a batch, and of a training step, at most."""

    config: Mapping[str, Any]
    budget: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of features, embedding and head."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def trainer(self) -> Trainer:
        """A new one, with EAGLE's own objective."""
        sizes = (self.config["vocab_size"], self.config["hidden_size"])
        with torch.device(self.device):
            torch.manual_seed(SEED)
            shared = [torch.randn(sizes, dtype=self.dtype) * 0.02 for _ in range(2)]
            return Trainer(network(self.config), Frozen(*shared), EAGLE)

    def runs(self, lengths: Sequence[Length]) -> list[Run]:
        """One for each length, in random order: as rollouts come out of a buffer. In host memory, as there."""
        generator = torch.Generator().manual_seed(SEED)
        runs = []
        for prompt, total in random.Random(SEED).sample(lengths, len(lengths)):
            tokens = torch.randint(self.config["vocab_size"], (total,), generator=generator)
            states = torch.randn(total, self.config["hidden_size"], generator=generator).to(self.dtype)
            runs.append(Run(tokens, states, states, prompt=prompt))
        return runs

    def wait(self) -> None:
        """Until the device has done what it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
