"""A drafter that has all tokens from the start, and learns from them until it gets no better."""

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks.lib.online.live import Sampled
from tlt_server.demo import default_paths
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.lossless import Tokens
from tlt_server.launch import has_gpu
from tlt_server.trainer.config import TrainConfig
from tlt_server.trainer.data.features import Feature
from tlt_server.trainer.learn.packing import pack
from tlt_server.trainer.publish.gate import mean
from tlt_server.trainer.publish.judge import candidate
from tlt_server.trainer.start import learning

WARM_SHARE = 0.5
"""Of the steps, before the rate falls to nothing along a cosine: what the trainer, which never stops, cannot do."""


class Best(NamedTuple):
    """The best drafter on the way. expected: its accept length, by the gate, on prompts kept out of training.

    steps: until it was there. entries: learnt from until then. of: steps in all.
    """

    folder: Path
    expected: float
    steps: int
    entries: int
    of: int


def learn(config: TrainConfig, sampled: Sequence[Sampled], entries: float, out: Path) -> Best:
    """Trains a drafter from nothing on responses, by the trainer's own code.

    Args:
        config: the online trainer's but for folder and addresses: the same prompts are held out.
        entries: learnt from in all, each time counted.
        out: folder to make for the drafter.
    """
    device = torch.device("cuda" if has_gpu() else "cpu")
    torch.set_num_threads(config.threads or torch.get_num_threads())  # as the trainer does
    parts = learning(config, device)
    trainer, buffer = parts.trainer, parts.buffer
    for feature in features(sampled, device):
        buffer.add(feature)
    held_out = pack(buffer.held_out(), config.entries, device)
    steps = math.ceil(entries / config.entries)
    best, learnt = Best(out, 0.0, 0, 0, steps), 0
    for step in range(1, steps + 1):
        trainer.settings = msgspec.structs.replace(config.optimizer, rate=_rate(config, step / steps))
        runs = buffer.draw(config.entries, trainer.random)
        trainer.step(pack(runs, config.entries, device))
        learnt += sum(run.learnt for run in runs)
        if step % config.gate.every and step < steps:
            continue
        sums, network = candidate(trainer, held_out, config.gate)
        expected = mean(sums)
        if expected > best.expected:
            best = Best(out, expected, step, learnt, steps)
            kept = {name: each.clone() for name, each in network.state_dict().items()}
    trainer.network.load_state_dict(kept)
    parts.drafter.export(out, {"steps": str(best.steps)})
    return best


def _rate(config: TrainConfig, done: float) -> float:
    falling = max(done - WARM_SHARE, 0.0) / (1 - WARM_SHARE)
    return config.optimizer.rate * max(0.5 + 0.5 * math.cos(math.pi * falling), 1e-6)


@torch.no_grad()
def features(sampled: Sequence[Sampled], device: torch.device) -> Iterator[Feature]:
    """What a server sends of these responses, by the embedded target here: all but the last token, which it never
    reads."""
    target = load_target(default_paths()[0]).to(device)
    for prompt, rollout in sampled:
        tokens = torch.tensor([*prompt, *rollout.tokens[:-1]])
        hidden, _ = target(tokens.to(device)[None], target.shape.rope(torch.arange(len(tokens), device=device)))
        states = hidden[0].to("cpu", torch.bfloat16 if device.type == "cuda" else torch.float32)
        yield Feature(rollout.rid, group_of(prompt), len(prompt), 0, tokens, states, 0)


def group_of(prompt: Tokens) -> int:
    """A server's name of all requests of a prompt, by which a trainer chooses what to hold out."""
    return int.from_bytes(hashlib.blake2b(array("q", prompt), digest_size=8).digest())
