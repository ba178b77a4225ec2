"""How long a workload's responses are, kept so that every machine has the same: models/WORKLOAD/lengths.json.

    python -m benchmarks.lib.training.lengths WORKLOAD

samples 16 responses to each of 32 problems at temperature 1, in minutes on a CPU, and writes them anew, in the order of
the problems.
"""

import sys
from typing import NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.lib.command import SEED
from benchmarks.models.workloads import WORKLOADS, Workload
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import problems
from tlt_server.demo.training.sampling import sample

PROBLEMS, GROUP = 32, 16


class Length(NamedTuple):
    """Of a rollout, in tokens: its prompt, and all of it."""

    prompt: int
    total: int


def kept(workload: Workload = WORKLOADS["demo"]) -> list[Length]:
    """Those of a workload."""
    return msgspec.json.decode(workload.lengths.read_bytes(), type=list[Length])


def sampled(workload: Workload, count: int, group: int) -> list[Length]:
    """Of `group` responses to each of `count` problems."""
    folder = workload.models / "target"
    target = load_target(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    drawn = problems(count, SEED, workload.task)
    prompts = [tokenizer.encode(problem.prompt).ids for problem in drawn for _ in range(group)]
    rollouts = sample(target, prompts, SEED, workload.longest)
    return [Length(each.prompt_length, len(each.tokens)) for each in rollouts]


if __name__ == "__main__":
    torch.set_num_threads(1)  # sums in one order, so that the same is drawn again
    of = WORKLOADS[sys.argv[1]]
    of.lengths.write_bytes(msgspec.json.encode(sampled(of, PROBLEMS, GROUP)) + b"\n")
