"""Runs: the same steps by every arm, from the same policy and drafter on."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from tlt_client import Client, DrafterUpdate
from tlt_grpo.log import Step
from tlt_grpo.publishing import Publisher
from tlt_grpo.train import Training
from torch import Tensor

from benchmarks.lib.adaptation.rl import OTHER_SIGNS
from benchmarks.lib.command import SEED, Models, out
from benchmarks.lib.draining import DecodeStep, decode_steps
from benchmarks.lib.step.plan import (
    AGAIN,
    BRIEF,
    COMPARED_STEPS,
    OFF,
    OFFLOAD,
    ON_POLICY,
    STATIC,
    TRAINED,
    Plan,
    rollouts,
)
from benchmarks.lib.step.policy import Learner
from benchmarks.lib.step.serving import Serving
from benchmarks.lib.strategies import Strategies
from tlt_server.demo.task import Problem, grade, problems, training_problems
from tlt_server.engine.decode.steplog import read_steps


@dataclass
class Taken:
    """One step.

    whole_s: from its prompts to the next one's. check_s: that self-checks took within the passes. used_gb: of the card,
    by everybody, at most; 0 on a CPU.
    """

    step: Step
    whole_s: float
    texts: list[str]
    cosines: list[float]
    check_s: float
    used_gb: float

    @property
    def lengths(self) -> list[int]:
        """Tokens that decode steps gave each response: the first is the prefill's."""
        return [length - 1 for length in self.step.lengths]


class Compared(NamedTuple):
    """What an arm is compared by: responses of its first step, and the small model's weights after some steps."""

    texts: list[str]
    policies: dict[int, dict[str, Tensor]]


@dataclass
class Run:
    """Of one arm: its steps, the small model's weights after some of them, and which held-out problems it solved."""

    arm: str
    steps: list[Taken] = field(default_factory=list)
    policies: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    held_out: list[bool] = field(default_factory=list)
    mode: str = ON_POLICY

    @property
    def compared(self) -> Compared:
        return Compared(self.steps[0].texts, self.policies)


class Kept:
    """A folder that remembers what each arm sampled first and had learnt, for arms of another command."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, run: Run, end: str) -> None:
        """end: batch and seed."""
        if self._folder is not None:
            torch.save(run.compared._asdict(), self._folder / f"{run.arm}-{end}.pt")

    def find(self, arm: str, end: str) -> Compared | None:
        path = self._folder / f"{arm}-{end}.pt" if self._folder is not None else None
        return Compared(**torch.load(path, weights_only=True)) if path is not None and path.exists() else None


class Runner:
    """Takes the steps of arms on servers."""

    def __init__(self, plan: Plan, models: Models, learner: Learner, seed: int) -> None:
        self.plan, self._models, self._learner, self._seed = plan, models, learner, seed
        self.config = plan.config(models.target, models.workload.longest, seed)
        asked = training_problems((plan.steps + 3) * plan.prompts, seed, models.workload.task)
        self._problems = asked[plan.prompts :]  # the first are the sweep's; the last, those that stay in flight
        self._strategies = Strategies()

    def sweep(self, serving: Serving) -> tuple[str, list[DecodeStep]]:
        """The fixed choice that drains a step's batch soonest, and all choices' decode steps, in a larger batch too.

        Responses are the same for all choices, token for token, but for near ties: their seeds are.
        """
        choices = [name for name, side in serving.sides.items() if side.arms and not side.learns and name != AGAIN]
        largest = max((self.plan.prompts, *self.plan.replayed))
        asked = training_problems(largest, self._seed, self._models.workload.task)
        took, seen = {}, []
        for name in choices:
            with self._beginning(name, serving) as training:
                self._drain(training, asked[: self.plan.prompts])  # kernels are compiled, prompts prefilled
                began = time.monotonic()
                self._drain(training, asked[: self.plan.prompts])
                took[name] = time.monotonic() - began
                since = serving.steps.stat().st_size
                self._drain(training, asked)
                seen += decode_steps(read_steps(serving.steps, since))
            out.print(f"{name}: a step's batch drains in {took[name]:.2f} s")
        drafting = {name: seconds for name, seconds in took.items() if name != OFF}
        return min(drafting, key=lambda name: drafting[name]), seen

    def run(self, arm: str, serving: Serving, static: str | None, mode: str = ON_POLICY) -> Run:
        """All steps of one arm; `static`: the fixed choice that is STATIC."""
        found, taking = Run(arm, mode=mode), _Taking()
        with self._beginning(static if arm == STATIC and static else arm, serving, taking, mode) as training:
            with closing(training.steps(0, self._problems)) as steps:
                for number in range(1, self.plan.steps_of(arm) + 1):
                    taking.changed = self.plan.change_after is not None and number > self.plan.change_after
                    taken = taking.step(lambda: next(steps), self._learner)
                    found.steps.append(taken)
                    if number in COMPARED_STEPS:
                        weights = self._learner.small.named_parameters()
                        found.policies[number] = {name: each.detach().cpu().clone() for name, each in weights}
                    out.print(f"{arm}, {mode}: {taken.step}")
            found.held_out = [] if arm in BRIEF else self._held_out(training)
        return found

    def _held_out(self, training: Training) -> list[bool]:
        """Which of the problems that nobody learns from the last policy solves."""
        asked = problems(self.plan.held_out, SEED, self._models.workload.task)
        sampled = training.roll_out([self._learner.tokens(problem.prompt) for problem in asked], "held out")
        return [training.grade(problem, each.text) for problem, each in zip(asked, sampled.all, strict=True)]

    @contextmanager
    def _beginning(
        self, arm: str, serving: Serving, taking: "_Taking | None" = None, mode: str = ON_POLICY
    ) -> Iterator[Training]:
        """With the first policy and the first drafter, of which a bandit knows nothing."""
        side, seed = serving.sides[arm], self._seed + 1000 * (arm == AGAIN)
        config = msgspec.structs.replace(
            self.config,
            seed=seed,
            rollouts=rollouts(mode),
            offload=mode == OFFLOAD,
            drafter_trainer=serving.trainer,
        )
        self._strategies.forget(side)
        self._learner.begin(self.plan.lesson if taking else None)
        with Client(serving.server.url) as client, self._strategies.active(serving.server, side):
            if side.arms and arm not in TRAINED:
                client.update_drafter(DrafterUpdate(str(self._models.drafter)))
            publisher = Publisher(client, config.out, config.publish, in_flight=config.rollouts != "on_policy")
            publisher.publish(self._learner, "0")
            listening = {"grade": taking.grade, "ended": taking.ended} if taking else {}
            yield Training(config, client, self._learner, publisher, **listening)
            publisher.close()

    def _drain(self, training: Training, asked: Sequence[Problem]) -> None:
        prompts = [self._learner.tokens(problem.prompt) for problem in asked for _ in range(self.plan.group)]
        training.roll_out(prompts, "sweep")


class _Taking:
    """Listens to a step: what it sampled, and what was used and trained in its phases."""

    def __init__(self) -> None:
        self.texts, self._used_gb = list[str](), 0.0
        self.changed = False
        """Whether the task has."""

    def grade(self, problem: Problem, text: str) -> bool:
        self.texts.append(text)
        return OTHER_SIGNS.grade(problem, text) if self.changed else grade(problem, text)

    def ended(self, _: str) -> None:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._used_gb = max(self._used_gb, (total - free) / 1e9)

    def step(self, take: Callable[[], Step], learner: Learner) -> Taken:
        self.texts, self._used_gb, learner.check_s = [], 0.0, 0.0
        began = time.monotonic()
        step = take()
        whole_s = time.monotonic() - began
        cosines = learner.checked() if step.learnt is not None else []
        return Taken(step, whole_s, self.texts, cosines, learner.check_s, self._used_gb)
