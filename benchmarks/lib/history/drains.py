"""Groups of rollouts drain, and again an epoch later: by what history drafts, beside a drafter and without one."""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from tlt_client import Client, DrafterUpdate
from tlt_client.schemas import SelectionBucket, Speculation, StrategyUpdate

from benchmarks.lib.accepting import DRAFTER_NOISE, LONGEST
from benchmarks.lib.command import EMBEDDED, Models, out
from benchmarks.lib.comparison import PLAIN
from benchmarks.lib.draining import decode_steps
from benchmarks.lib.history.drained import EPOCHS, KINDS, STATES, UNREPEATED, Run, figures_of, tokens_a_pass
from benchmarks.lib.reload.weights import noisy
from benchmarks.lib.servers import Request, logging_steps
from benchmarks.lib.sides import Side, SideServer, Site, awake, side_by_side
from benchmarks.lib.strategies import Strategies, selection
from benchmarks.models import shapes
from benchmarks.models.workloads import MODELS, Workload
from tlt_server.config import Arm
from tlt_server.engine.decode.steplog import read_steps
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu
from tlt_server.process import tail
from tlt_server.results import Figures

HISTORY = tuple(Arm.history(steps) for steps in (3, 7, 15))
ARMS = (*(Arm(steps, 1, steps + 1) for steps in (1, 3, 7, 15)), *HISTORY)
CPU_ARMS = (Arm(3, 1, 4), HISTORY[1])
HELD = 1024
"""Tokens of KV cache a request: a few are far longer while most have ended."""


class Plan(NamedTuple):
    """requests: that drain at once, in groups. longest: tokens of a response. sizes: of batches that have graphs."""

    requests: int
    group: int
    longest: int
    sizes: Sequence[int]
    arms: Sequence[Arm] = ARMS
    history: Sequence[Arm] = HISTORY


GPU_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FULL = Plan(128, 16, LONGEST, GPU_SIZES)
CPU = Plan(32, 16, LONGEST, (1, 2, 4, 8, 16, 32), CPU_ARMS, CPU_ARMS[1:])
SMOKE = Plan(4, 2, 64, (1, 2, 4), CPU_ARMS, CPU_ARMS[1:])


class Turn(NamedTuple):
    """How a server drains. name: in figures; remembers: requests read and write history."""

    name: str
    side: Side
    remembers: bool
    batches: Sequence[str] = EPOCHS


def turns(plan: Plan, states: Sequence[str], flags: Mapping[str, tuple[str, ...]]) -> list[Turn]:
    """Plain decoding first. Where a server without a drafter is measured, it is plain, too: with the strategy off."""
    arms = {"undrafted": tuple(plan.history), "arms": tuple(plan.arms)}

    def side(name: str, server: str, strategy: StrategyUpdate) -> Side:
        return Side(name, arms=arms[server], strategy=strategy, max_batch=plan.requests, flags=flags[server])

    off, bandit = StrategyUpdate("off"), StrategyUpdate("bandit")
    alone = "none" in states
    found = [Turn(PLAIN, side(PLAIN, "undrafted" if alone else "arms", off), remembers=False)]
    if alone:
        found.append(Turn("no_drafter", side("no_drafter", "undrafted", bandit), remembers=True))
    for state in (state for state in STATES if state in states and state != "none"):
        pair = [Turn(f"{state}_{kind}", side(f"{state}_{kind}", "arms", bandit), kind == "history") for kind in KINDS]
        found += pair
        if state == "fresh":
            found += [
                each._replace(name=f"{UNREPEATED}_{k}", batches=(UNREPEATED,))
                for each, k in zip(pair, KINDS, strict=True)
            ]
    return found


def batches(models: Models, plan: Plan) -> dict[str, list[Request]]:
    """Two epochs of the same prompts in groups, by other seeds; and as many prompts that nobody has answered."""
    groups = plan.requests // plan.group
    prompts = models.prompts(groups + plan.requests)
    longest = min(plan.longest, models.workload.longest)

    def asked(of: Sequence[Sequence[int]], number: int) -> list[Request]:
        first = number * plan.requests
        params = {"temperature": 1.0, "max_new_tokens": longest}
        return [(prompt, {**params, "sampling_seed": first + i}) for i, prompt in enumerate(of)]

    grouped = [prompt for prompt in prompts[:groups] for _ in range(plan.group)]
    return {name: asked(grouped, i) for i, name in enumerate(EPOCHS)} | {UNREPEATED: asked(prompts[groups:], 2)}


@dataclass
class Bench:
    """Servers, by name, and what drained on them: by turn and batch, a run a round."""

    servers: Mapping[str, SideServer]
    logs: Mapping[str, Path]
    work: Mapping[str, Sequence[Request]]
    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict)
    strategies: Strategies = field(default_factory=Strategies)

    def take(self, turn: Turn) -> None:
        """One after another, its batches, from an empty history and what the server knew of its arms at its start."""
        server = self.servers[turn.side.server]
        self.strategies.forget(turn.side)
        with awake(server), Client(server.url) as client:
            client.forget_history()
            with self.strategies.active(server, turn.side):
                if not turn.remembers and turn.side.learns:
                    client.set_strategy(StrategyUpdate("bandit", buckets=without_history(server)))
                for batch in turn.batches:
                    run = self._drain(turn, server, batch)
                    self.runs.setdefault((turn.name, batch), []).append(run)
                    out.print(f"{turn.name}, {batch}: {run.seconds:.2f} s, {tokens_a_pass(run):.2f} tokens a pass")

    def warm_up(self, turn: Turn) -> None:
        """Kernels are compiled."""
        server = self.servers[turn.side.server]
        short = [(prompt, {**params, "max_new_tokens": 24}) for prompt, params in self.work[EPOCHS[0]]]
        with awake(server), self.strategies.active(server, turn.side):
            self._ask(server, short, turn)

    def _ask(self, server: SideServer, requests: Sequence[Request], turn: Turn) -> list[int]:
        """Tokens of the responses."""
        count, asks = len(requests), "both" if turn.remembers else "none"
        answers = server.ask(requests, at_once=count, together=count, history=asks)
        if server.failed:
            raise ServerFailed(f"a drain failed; the end of {server.log}:\n{tail(server.log)}")
        return [each["meta_info"]["completion_tokens"] for each in answers if each]

    def _drain(self, turn: Turn, server: SideServer, batch: str) -> Run:
        log = self.logs[turn.side.server]
        since, began = log.stat().st_size, time.monotonic()
        counts = self._ask(server, self.work[batch], turn)
        took = time.monotonic() - began
        return Run(took, [count - 1 for count in counts], decode_steps(read_steps(log, since)))  # one is the prefill's


def without_history(server: SideServer) -> tuple[SelectionBucket, ...]:
    """The server's own buckets, with what else they have."""
    return tuple(
        SelectionBucket(
            each.first, tuple(told.arm for told in each.arms if not told.arm or told.arm.source != "history")
        )
        for each in selection(server).buckets
    )


def graphs_gb(server: SideServer) -> float | None:
    """That all CUDA graphs of its decode steps take; None on a CPU."""
    with awake(server):
        answer = server.http.get(f"{server.url}/tlt/v1/strategy").raise_for_status()
    graphs = msgspec.convert(answer.json(), Speculation).graphs
    return graphs.gb if graphs else None


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """All figures so far, after each turn."""
    plan = SMOKE if arguments.smoke else FULL if has_gpu() else CPU
    step_logs = {server: logs / f"steps-{server}.jsonl" for server in ("undrafted", "arms")}
    # the watchdog would take back what is meant to be worse
    more = {"undrafted": (), "arms": ("--watchdog", "observe")}
    flags = {name: (*logging_steps(log), *more[name]) for name, log in step_logs.items()}
    asked = turns(plan, arguments.states, flags)
    site = Site(models.target, models.drafter, logs, plan.sizes, HELD * plan.requests, natural=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        drafters = {"fresh": models.drafter}
        if "stale" in arguments.states:
            drafters["stale"] = stale(models, arguments.shape, scratch)
        servers = stack.enter_context(side_by_side([turn.side for turn in asked], site))
        bench = Bench(servers, step_logs, batches(models, plan))
        for turn in asked:
            bench.warm_up(turn)
        graphs = {f"graphs_gb_{name}": taken for name, server in servers.items() if (taken := graphs_gb(server))}
        for figures in rounds(bench, asked, drafters, arguments.rounds, plan):
            yield figures | graphs


def rounds(
    bench: Bench, asked: Sequence[Turn], drafters: Mapping[str, Path], count: int, plan: Plan
) -> Iterator[Figures]:
    """Turn by turn; each round has bandits with history and without in another order."""
    active = "fresh"
    for number in range(count):
        for turn in asked if number % 2 == 0 else [*asked[:1], *reversed(asked[1:])]:
            wanted = "stale" if turn.name.startswith("stale") else "fresh"
            if turn.side.server == "arms" and wanted != active:
                active, server = wanted, bench.servers["arms"]
                with awake(server), Client(server.url) as client:
                    client.update_drafter(DrafterUpdate(str(drafters[wanted])))
            bench.take(turn)
            totals = [(server.requests, server.failed) for server in bench.servers.values()]
            requests, failed = map(sum, zip(*totals, strict=True))
            yield figures_of(bench.runs, plan.sizes) | {"requests": requests, "failed_requests": failed}


def stale(models: Models, shape: str, scratch: Path) -> Path:
    """The drafter of models in a shape, with noise on what it knows."""
    source, small = models.workload.models, scratch / "small"
    small.mkdir()
    for name in MODELS:
        if name != "drafter":
            (small / name).symlink_to(source / name)
    noisy(source / "drafter", small / "drafter", 1, DRAFTER_NOISE)
    if shape == EMBEDDED:
        return small / "drafter"
    workload = Workload("stale", small, models.workload.task, models.workload.longest)
    dtype = torch.bfloat16 if has_gpu() else torch.float32
    built = shapes.build(shape, scratch / "large", workload=workload, dtype=dtype, names=("drafter",))
    torch.cuda.empty_cache()  # the servers need what building took
    return built.drafter
