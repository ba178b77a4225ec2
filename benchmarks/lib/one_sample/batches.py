"""One server with several arms: with speculation against off, and off against off in batches of other sizes.

In bfloat16 a pass of another shape rounds otherwise, whatever it is for: the second comparison is the control, at the
rows that arms verify in too. The same requests are answered each time, all at temperature 1. The judge is the target as
it is served, in float32.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tlt_client import Client, Rollout, SamplingParams, StrategyUpdate

from benchmarks.lib.command import Models
from benchmarks.lib.one_sample.judging import Compared, compare
from benchmarks.lib.one_sample.requests import SEED, Request
from benchmarks.lib.servers import GPU_FLAGS, GRAPH_SIZES
from benchmarks.lib.strategies import any_arm
from tlt_server.config import Arm
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.launch import has_gpu
from tlt_server.process import running_server
from tlt_server.results import Figures

ARMS = (Arm(3, 1, 4), Arm(7, 1, 8), Arm(5, 4, 16))
CONTEXT = 2048
BASE = 64


@dataclass(frozen=True)
class Turn:
    """at_once: requests in flight. share: of the requests. control: it tells what rounding does, not speculation."""

    name: str
    at_once: int
    strategy: StrategyUpdate
    share: float = 1.0
    control: bool = False


def turns() -> list[Turn]:
    """The first one is what the others are held against. The tree has graphs for up to 32 requests."""
    largest = GRAPH_SIZES[-1]
    drawn = any_arm({arm: sizes_of(arm, GRAPH_SIZES)[-1] if has_gpu() else largest for arm in ARMS}, largest)
    off = StrategyUpdate("off")
    return [
        Turn("off", BASE, off),
        Turn("arms", BASE, drawn),
        Turn("bandit", BASE, StrategyUpdate("bandit")),
        Turn("trees", BASE // 2, drawn),
        Turn("off256", 4 * BASE, off, control=True),  # of as many rows as a chain of 3 verifies
        Turn("off128", 2 * BASE, off, control=True),
        Turn("off16", BASE // 4, off, share=1 / 2, control=True),
    ]


def requests(models: Models, count: int, length: int) -> list[Request]:
    """Each with a seed, past its end."""
    return [
        Request(
            "temperature 1",
            prompt,
            SamplingParams(temperature=1.0, max_new_tokens=length, ignore_eos=True, sampling_seed=SEED * i + 3),
        )
        for i, prompt in enumerate(models.prompts(count))
    ]


def take(url: str, turn: Turn, asked: Sequence[Request]) -> list[Rollout]:
    """A turn's responses."""
    with Client(url, max_concurrency=turn.at_once) as client:
        client.set_strategy(turn.strategy)
        return client.generate_batch([each.prompt for each in asked], [each.params for each in asked])


def measured(models: Models, logs: Path, count: int, length: int) -> Iterator[Figures]:
    """All figures so far, after each turn; in the end, with what the judge says."""
    asked = requests(models, count, length)
    first, *others = turns()
    flags = ["--model-path", str(models.target), "--drafter", str(models.drafter), "--context-length", str(CONTEXT)]
    flags += [word for arm in ARMS for word in ("--arm", f"{arm.num_steps},{arm.topk},{arm.num_draft_tokens}")]
    flags += GPU_FLAGS if has_gpu() else []
    given: dict[Turn, list[Rollout]] = {}
    began = time.monotonic()
    with running_server(flags, logs / "one_sample.log", start_timeout=500) as url:
        figures: Figures = {"server_start_s": time.monotonic() - began}
        expected = take(url, first, asked)
        for turn in others:
            given[turn] = take(url, turn, asked[: round(turn.share * count)])
            pairs = zip(given[turn], expected, strict=False)
            equal = [each.tokens == other.tokens for each, other in pairs]
            figures[f"equal_responses_share_{turn.name}"] = sum(equal) / len(equal)
            yield figures
    yield figures | judged(models, asked, expected, given)


def judged(
    models: Models, asked: Sequence[Request], expected: Sequence[Rollout], given: Mapping[Turn, Sequence[Rollout]]
) -> Figures:
    """Whether rounding explains each place where responses part."""
    reference = Reference(models.target, torch.float32, "cuda" if has_gpu() else "cpu")

    def judge(prompt: Tokens, response: Tokens) -> torch.Tensor:
        return reference.along(prompt, response).cpu()

    found = {False: Compared(), True: Compared()}
    for turn, rollouts in given.items():
        count = len(rollouts)
        found[turn.control] += compare(judge, asked[:count], expected[:count], rollouts, bfloat16=has_gpu())
    return summary(found)


def summary(found: Mapping[bool, Compared]) -> Figures:
    """With speculation; and of the control."""
    figures: Figures = {"responses": found[False].responses, "compared_tokens": found[False].tokens}
    for control, compared in found.items():
        of, partings = "_control" if control else "", [each for _, each in compared.parted]
        ties = sum(each.tie for each in partings)
        figures |= {
            f"equal_responses_share{of}": compared.equal_share,
            f"tie_divergences{of}": ties,
            f"non_tie_divergences{of}": len(partings) - ties,
            f"divergences_beyond_a_step{of}": sum(each.in_steps > 1 for each in partings),
            f"gap_steps_max{of}": max((each.in_steps for each in partings), default=0.0),
        }
        if partings:
            figures[f"tokens_per_divergence{of}"] = compared.tokens / len(partings)
    return figures
