"""Is a long response learnt to its end, and taken in as it arrives? No server.

    python -m benchmarks long --json benchmarks/results/long.cpu2.json

1. an EAGLE drafter with random weights learns from the longest solutions of the long workload, as the trainer's buffer
   draws them; beside it, at equal steps, one that learns from the first pack of each alone. Both are judged on all of
   other solutions, by quarter of the response.
2. features of responses that grow side by side go over a link into the buffer, from another process.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.markdown import Markdown
from tokenizers import Tokenizer

from benchmarks.lib.command import SEED, out, parser_of_seeds, run
from benchmarks.lib.tables import origin, table
from benchmarks.lib.training import ingestion
from benchmarks.lib.training.rollouts import runs as with_states
from benchmarks.models.workloads import WORKLOADS
from tlt_server import results
from tlt_server.config import DrafterKind
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import Problem, problems, solve, training_problems
from tlt_server.demo.tokens import END_ID
from tlt_server.demo.training.corpus import Sequence as Rollout
from tlt_server.drafter.folder import create
from tlt_server.drafter.hits import SHARPNESS
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result
from tlt_server.trainer.data.buffer import CONTEXT, Buffer
from tlt_server.trainer.data.features import Feature
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import EAGLE
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Run, join, pack, split, within
from tlt_server.trainer.publish.folder import load_drafter, load_frozen
from tlt_server.trainer.publish.gate import chain_reach

MEASURES = ("tlt_server/trainer/data", "tlt_server/trainer/learn")
LONG = WORKLOADS["long"]
DEPTH, QUARTERS = 3, 4


class Plan(NamedTuple):
    """responses: learnt from; judged: others. shortest, longest: tokens of a response. steps: of training, of `entries`
    each. width: of the states that go over the link; lengths: of the responses whose ingestion is compared."""

    responses: int = 24
    judged: int = 4
    shortest: int = 8_000
    longest: int = 16_000
    steps: int = 300
    entries: int = 4096  # the trainer's default
    width: int = 3584
    lengths: tuple[int, ...] = (16_384, 32_768, 65_536)


SMOKE = Plan(2, 1, 1_000, 3_000, steps=3, entries=256, width=64, lengths=(1024, 2048, 4096))


def solutions(of: Callable[..., list[Problem]], count: int, plan: Plan) -> list[Rollout]:
    """Those of the task's own that are so long: as the target's are, of which one in a hundred is."""
    tokenizer = Tokenizer.from_file(str(LONG.models / "target/tokenizer.json"))
    draw, found, seed = random.Random(SEED), list[Rollout](), SEED
    while len(found) < count:
        seed += 1
        for problem in of(1000, seed, LONG.task):
            text = solve(problem, draw, LONG.task)
            if len(text) < plan.shortest:  # a token is a character or more
                continue
            prompt, response = (tokenizer.encode(each).ids for each in (problem.prompt, text))
            if plan.shortest <= len(response) < plan.longest:
                found.append(Rollout(np.array([*prompt, *response, END_ID], dtype=np.int16), len(prompt)))
    return found[:count]


def trained(plan: Plan, runs: Sequence[Run], frozen: Frozen, seed: int, *, whole: bool) -> Network:
    """whole: by windows of each response, as the trainer does; else by the first pack of each."""
    device = frozen.head.device
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
        create(str(LONG.models / "target"), Path(scratch) / "drafter", DrafterKind.EAGLE, seed=seed)
        network = load_drafter(Path(scratch) / "drafter").network.to(device)
    trainer = Trainer(network, frozen, EAGLE, Settings(rate=2e-3), seed)
    buffer = _buffer(plan, runs)
    firsts = [split(each, plan.entries)[0] for each in runs]
    for _ in range(plan.steps):
        drawn = buffer.draw(plan.entries, trainer.random) if whole else trainer.random.sample(firsts, len(firsts))
        trainer.step(pack(within(drawn, plan.entries), plan.entries, device))
    return trainer.average


def _buffer(plan: Plan, runs: Sequence[Run]) -> Buffer:
    width = runs[0].states.shape[1]
    buffer = Buffer(width, width, 1 << 40, plan.entries, held_out=0)
    for number, each in enumerate(runs):
        states = each.states.cpu()
        buffer.add(Feature(str(number), number, each.prompt, 0, each.tokens.cpu(), states, 0))
    return buffer


def by_quarter(network: Network, frozen: Frozen, judged: Sequence[Run]) -> list[float]:
    """Expected accept length of chains that begin in each quarter of a response, all that lies before them read; at the
    sharpness of drafts that is best over all quarters."""
    totals = torch.zeros(QUARTERS, len(SHARPNESS), dtype=torch.float64)
    chains = torch.zeros(QUARTERS)
    for each in judged:
        at, reached = (found.cpu() for found in chain_reach(network, frozen, join([each]), DEPTH))
        lengths = 1 + reached.sum(1)
        quarter = (at * QUARTERS // each.entries).clamp(max=QUARTERS - 1)
        totals.index_add_(0, quarter, lengths)
        chains += torch.bincount(quarter, minlength=QUARTERS)
    return (totals[:, totals.sum(0).argmax()] / chains).tolist()


def learning(plan: Plan, seeds: Sequence[int]) -> Figures:
    """Means over seeds; of the ratio, the least too."""
    device = torch.device("cuda" if has_gpu() else "cpu")
    target = load_target(LONG.models / "target").to(device)
    sources = (training_problems, plan.responses), (problems, plan.judged)
    learnt, judged = (list(with_states(target, DrafterKind.EAGLE, solutions(*each, plan))) for each in sources)
    frozen = load_frozen(LONG.models / "target", 0, learnt[0].finals.dtype).to(device)
    lengths = [each.entries + 1 for each in (*learnt, *judged)]
    made: Figures = {"responses": len(learnt), "judged": len(judged), "steps": plan.steps, "entries": plan.entries}
    made |= {"context": int(CONTEXT * plan.entries), "seeds": len(seeds)}
    made |= {"response_tokens_min": min(lengths), "response_tokens_max": max(lengths)}
    for name, whole in (("", True), ("first_pack_", False)):
        found = [by_quarter(trained(plan, learnt, frozen, seed, whole=whole), frozen, judged) for seed in seeds]
        means = np.mean(found, axis=0)
        made |= {f"{name}accept_length_quarter_{n}": float(mean) for n, mean in enumerate(means, 1)}
        ratios = [each[-1] / each[0] for each in found]
        made |= {f"{name}last_over_first_quarter": float(np.mean(ratios))}
        made |= {f"{name}last_over_first_quarter_min": min(ratios)}
        out.print(f"{name or 'windows '}{[f'{each:.3f}' for each in means]}")
    return made


def taking_in(plan: Plan) -> Figures:
    """Sixteen responses of the width of a 7B model; and a few narrow ones, by length: the least of three takings."""
    length, requests = plan.lengths[0] // 4, 16
    wide = min(ingestion.seconds(requests, length, plan.width) for _ in range(3))
    made: Figures = {"ingestion_width": plan.width, "ingestion_mb_s": requests * length * plan.width * 2 / wide / 1e6}
    took = [min(ingestion.seconds(4, each, 256) for _ in range(3)) for each in plan.lengths]
    made |= {f"ingestion_s_{each >> 10}k": seconds for each, seconds in zip(plan.lengths, took, strict=True)}
    made["ingestion_64k_over_32k"] = took[-1] / took[-2]
    return made


def shown(result: Result) -> str:
    """As Markdown."""
    found = result.figures
    text = (
        f"Learnt from {found['responses']} responses of {found['response_tokens_min']:,} to "
        f"{found['response_tokens_max']:,} tokens, {found['steps']:,} steps of {found['entries']:,} entries, "
        f"{found['seeds']} drafters each; judged on {found['judged']} others. Features of {found['ingestion_width']:,} "
        f"bfloat16 numbers come in at {found['ingestion_mb_s']:,.0f} MB/s; a response of 64k tokens takes "
        f"{found['ingestion_64k_over_32k']:.2f} times as long as one of 32k."
    )
    rows = []
    for words, name in (("windows of the whole response", ""), ("its first pack alone", "first_pack_")):
        quarters = (found[f"{name}accept_length_quarter_{n}"] for n in range(1, QUARTERS + 1))
        ratio, least = (found[f"{name}last_over_first_quarter{end}"] for end in ("", "_min"))
        rows.append([words, *(f"{each:.2f}" for each in quarters), f"{ratio:.3f}", f"{least:.3f}"])
    header = ["learnt by", *(f"quarter {n}" for n in range(1, QUARTERS + 1)), "last over first", "least"]
    return "\n\n".join((origin(result), text, table(header, rows)))


def main(argv: Sequence[str]) -> None:
    parser = parser_of_seeds("long", __doc__)
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        plan, seeds = (SMOKE, [0]) if arguments.smoke else (Plan(), arguments.seeds)
        result = results.measured_here("long", [*parser.prog.split(), *argv], learning(plan, seeds) | taking_in(plan))
        out.print(Markdown(shown(result)))
        return result

    run("long", arguments, measure)
