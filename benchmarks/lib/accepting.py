"""What a server's arms accept to natural ends; and what follows of the same responses by computation.

Of a response's tokens, the target's law and the drafter's, `drafter/hits.py` tells how likely each draft was to be the
token; the chances of a chain give the verify passes to be expected of the response. The weights are those of the
workload's small models, which the served ones compute, in float32.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tlt_client import Client, DrafterUpdate

from benchmarks.lib.command import EMBEDDED, Models, out
from benchmarks.lib.reload.weights import noisy
from benchmarks.lib.servers import Answer
from benchmarks.lib.sides import Side, SideServer, Site, awake, side_by_side
from benchmarks.lib.strategies import Strategies, fixed
from benchmarks.models import shapes
from benchmarks.models.workloads import MODELS, Workload
from tlt_server.config import Arm
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.training.corpus import Sequence as Written
from tlt_server.demo.training.evaluate import Asked, judge, walk
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu
from tlt_server.results import Figures
from tlt_server.trainer.publish.folder import load_drafter

CHAIN_3 = Arm(3, 1, 4)
NATURAL_ARMS = (CHAIN_3, Arm(7, 1, 8), Arm(5, 4, 16), Arm(8, 4, 32))
COMPUTED, GREEDY = "_computed", "_computed_greedy"
AT_ONCE = (1, 4, 16, 64, 256)  # requests; an arm is asked as many as it has graphs for, which then drain
RESPONSES, GROUP = 512, 8
LONGEST = 4096  # tokens of a response: beyond it a few requests would take most of the time
HELD = 1024  # tokens of KV cache a request: a few are longer while most have ended
MOST_CONTEXTS = 16  # at once, and different ones; each is asked several times
DRAFTER_NOISE, TARGET_NOISE = 0.2, 0.02
"""Of each tensor's deviation: a drafter that lost much of what it knew; a target one publication further."""


@dataclass(frozen=True)
class Case:
    """What an arm is asked. context: tokens of solved problems before each."""

    figure: str
    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 1.0})
    responses: int = RESPONSES // 2
    context: int | None = None


CASES = (
    Case("natural_{}", responses=RESPONSES),
    Case("natural_{}_temperature_06", {"temperature": 0.6}),
    Case("natural_{}_top_p_095", {"temperature": 1.0, "top_p": 0.95}),
    Case("{}_at_1024", context=1024),
    Case("{}_at_16384", responses=RESPONSES // 8, context=16_384),
)
SMOKE_CASES = (Case("natural_{}", responses=8), Case("{}_at_512", responses=8, context=512))


@dataclass(frozen=True)
class Plan:
    """arms: to be asked. cases: what chains are asked; trees are asked the first one alone, and so are chains of other
    weights. longest: tokens of a response."""

    arms: Sequence[Arm]
    cases: Sequence[Case]
    sizes: Sequence[int]
    longest: int


def plan_of(smoke: bool, eagle3: bool) -> Plan:
    """On a CPU chains alone, without contexts, of a quarter of the responses."""
    if smoke:
        plan = Plan(NATURAL_ARMS[:1], SMOKE_CASES, AT_ONCE[:3], 96)
    elif has_gpu():
        plan = Plan(NATURAL_ARMS, CASES, AT_ONCE, LONGEST)
    else:
        short = [replace(case, responses=case.responses // 4) for case in CASES if case.context is None]
        plan = Plan(NATURAL_ARMS[:2], short, AT_ONCE[:3], LONGEST)
    return replace(plan, arms=plan.arms[:2], cases=plan.cases[:1]) if eagle3 else plan


def natural(models: Models, logs: Path, arguments: argparse.Namespace) -> Iterator[Figures]:
    """Accept lengths of one server by each of its arms, after each case; in the end, with what is computed of them."""
    plan = plan_of(arguments.smoke, arguments.eagle3)
    most = {arm: sizes_of(arm, plan.sizes)[-1] if has_gpu() else plan.sizes[-1] for arm in plan.arms}
    group = [side for side in fixed(most, plan.sizes[-1]) if side.drafts]
    contexts = max(case.context or 0 for case in plan.cases)
    held = max(HELD * plan.sizes[-1], (contexts + HELD) * MOST_CONTEXTS)
    flags = ("--watchdog", "observe")  # it would take back what is meant to be worse
    site = Site(models.target, models.drafter, logs, plan.sizes, held, flags=flags, natural=True)
    with tempfile.TemporaryDirectory() as scratch, side_by_side(group, site) as servers, ThreadPoolExecutor(1) as pool:
        asking = Asking(servers[group[0].server], plan.longest, pool)
        parts = (models.workload.models / each.name for each in (models.target, models.drafter))
        small = None if arguments.model_path else Models(*parts)
        chains = [side for side in group if chain_of(side)]
        for side in group:
            for case in plan.cases if side in chains else plan.cases[:1]:
                yield asking.ask(models, side, case, "_eagle3" if arguments.eagle3 else "", small)
        if small and not arguments.eagle3:
            for of, changed in others(models, arguments.shape, Path(scratch), asking.server):
                for side in chains:
                    yield asking.ask(models, side, plan.cases[0], of, changed)
        yield asking.done()


def others(models: Models, shape: str, scratch: Path, server: SideServer) -> Iterator[tuple[str, Models]]:
    """Puts other weights into the server: how figures of them end, and the small models that it serves then."""
    source = models.workload.models
    small = Workload("changed", scratch / "small", models.workload.task, models.workload.longest)
    small.models.mkdir()
    for name in MODELS:
        (small.models / name).symlink_to(source / name)
    for name, scale in (("drafter", DRAFTER_NOISE), ("target", TARGET_NOISE)):
        (small.models / name).unlink()
        noisy(source / name, small.models / name, 1, scale)
    if shape == EMBEDDED:
        target, drafter = small.models / "target", small.models / "drafter"
    else:
        dtype = torch.bfloat16 if has_gpu() else torch.float32
        built = shapes.build(shape, scratch / "large", workload=small, dtype=dtype)
        torch.cuda.empty_cache()
        target, drafter = built.target, built.drafter
    with awake(server), Client(server.url) as client:
        client.update_drafter(DrafterUpdate(str(drafter)))
    yield "_noised", Models(source / "target", small.models / "drafter")
    with awake(server), Client(server.url) as client:
        client.update_drafter(DrafterUpdate(str(models.drafter)))
        client.update_weights_from_disk(str(target))
    yield "_stale", Models(small.models / "target", source / "drafter")


@dataclass
class Asking:
    """A server's responses, and what is computed of them meanwhile. longest: tokens of a response."""

    server: SideServer
    longest: int
    pool: ThreadPoolExecutor
    figures: Figures = field(default_factory=dict)
    computing: dict[str, Future[Figures]] = field(default_factory=dict)
    strategies: Strategies = field(default_factory=Strategies)

    def ask(self, models: Models, side: Side, case: Case, of: str, small: Models | None) -> Figures:
        """All figures so far. of: ends this one's name. small: what is served, as it was before it was made larger."""
        began, figure = time.monotonic(), f"accept_length_{case.figure.format(side.name)}{of}"
        with awake(self.server), self.strategies.active(self.server, side):
            prompts, answers = _answers(self.server, models, case, self.longest, side.max_batch)
        tokens, passes = (
            sum(each["meta_info"][name] for each in answers) for name in ("completion_tokens", "spec_verify_ct")
        )
        self.figures[figure] = (tokens - len(answers)) / passes
        out.print(f"{figure}: {self.figures[figure]:.3f}, in {time.monotonic() - began:.0f} s")
        if small and case.context is None and (steps := chain_of(side)):
            asked = Asked(steps, case.sampling["temperature"], case.sampling.get("top_p", 1.0))
            written = [
                Written(np.array([*prompt, *each["output_ids"]]), len(prompt))
                for prompt, each in zip(prompts, answers, strict=True)
            ]
            self.computing[figure] = self.pool.submit(computed, small, written, asked)
        return self._so_far()

    def done(self) -> Figures:
        """With what is computed."""
        for figure, future in self.computing.items():
            self.figures |= {figure + end: value for end, value in future.result().items()}
        return self._so_far()

    def _so_far(self) -> Figures:
        return self.figures | {"requests": self.server.requests, "failed_requests": self.server.failed}


def chain_of(side: Side) -> int | None:
    """Steps of a chain; None of a tree."""
    pinned = side.strategy and side.strategy.pinned
    return pinned.num_steps if pinned and pinned.topk == 1 else None


def _answers(
    server: SideServer, models: Models, case: Case, longest: int, most: int
) -> tuple[Sequence[Tokens], list[Answer]]:
    """Prompts and their responses."""
    different = case.responses // GROUP if case.context is None else min(MOST_CONTEXTS, case.responses)
    prompts = models.prompts(different, case.context) * (case.responses // different)
    params = {**case.sampling, "max_new_tokens": longest}
    at_once = most if case.context is None else min(most, MOST_CONTEXTS)
    # in waves: with prompts so short, requests that follow one another would be prefilled for most of the time
    answers = server.ask([(prompt, params) for prompt in prompts], at_once=at_once, together=at_once)
    made = [answer for answer in answers if answer is not None]
    if len(made) < len(answers):
        raise ServerFailed(
            f"{case.figure}: {len(answers) - len(made)} requests failed, and what they gave is not known"
        )
    return prompts, made


def computed(small: Models, written: Sequence[Written], asked: Asked) -> Figures:
    """Tokens a verify pass that are to be expected of these responses: at the sharpness that gives most, and of the
    likeliest drafts."""
    judged = judge(load_target(small.target), load_drafter(small.drafter).network, list(written), asked)
    tokens = sum(len(each.top1) for each in judged)
    passes = [float(sum(walk(hits)[0] for hits in each)) for each in zip(*(one.hits for one in judged), strict=True)]
    return {COMPUTED: tokens / min(passes), GREEDY: tokens / passes[-1]}
