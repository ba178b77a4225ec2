"""How long the embedded target's responses are, kept so that every machine trains on the same: lengths.json.

    python -m benchmarks.lib.training.lengths

samples 16 responses to each of 32 problems at temperature 1, in a minute on a CPU, and writes them anew, in the order
of the problems.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.lib.command import SEED
from tlt_server.demo import default_paths
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import problems
from tlt_server.demo.training.sampling import sample

KEPT = Path(__file__).with_name("lengths.json")
PROBLEMS, GROUP = 32, 16


class Length(NamedTuple):
    """Of a rollout, in tokens: its prompt, and all of it."""

    prompt: int
    total: int


def kept() -> list[Length]:
    """Those of lengths.json."""
    return msgspec.json.decode(KEPT.read_bytes(), type=list[Length])


def sampled(count: int, group: int) -> list[Length]:
    """Of `group` responses to each of `count` problems."""
    folder, _ = default_paths()
    target = load_target(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(problem.prompt).ids for problem in problems(count, SEED) for _ in range(group)]
    rollouts = sample(target, prompts, SEED, target.shape.context)
    return [Length(each.prompt_length, len(each.tokens)) for each in rollouts]


if __name__ == "__main__":
    torch.set_num_threads(1)  # sums in one order, so that the same is drawn again
    KEPT.write_bytes(msgspec.json.encode(sampled(PROBLEMS, GROUP)) + b"\n")
