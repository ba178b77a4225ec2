"""A run. `Training.step` reads as the algorithm does."""

import logging
import statistics
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tlt_client import Client, SamplingParams, sample_seed
from tlt_client.errors import VersionConflict
from tlt_server.demo.task import Problem, grade, problems, training_problems

from tlt_grpo.clock import Clock
from tlt_grpo.config import Config
from tlt_grpo.drafting import Drafting
from tlt_grpo.in_flight import AHEAD, Flight
from tlt_grpo.learning.advantages import group_advantages
from tlt_grpo.learning.batches import Trajectory
from tlt_grpo.learning.policy import Learnt, Policy
from tlt_grpo.log import HeldOut, Line, Step, aged
from tlt_grpo.publishing import Publisher
from tlt_grpo.rollouts import Batch, Rollouts, ages, roll_out, sampling

logger = logging.getLogger(__name__)
STATE = "state.pt"
"""In `out`: what a run is resumed from."""


@dataclass(frozen=True)
class Training:
    """What the steps of a run share."""

    config: Config
    client: Client
    policy: Policy
    publisher: Publisher
    grade: Callable[[Problem, str], bool] = grade
    """Whether a response solves its problem: the reward."""
    ended: Callable[[str], None] = lambda _: None
    """Told of each phase of a step that is over."""

    def steps(self, done: int, asked: Sequence[Problem]) -> Generator[Step]:
        """Those after `done`, for which there are problems: the first of `asked` are step 1's."""
        size, ahead = self.config.prompts, AHEAD[self.config.rollouts]
        parts = [asked[i : i + size] for i in range(0, len(asked), size)]
        with Flight(self.client, size * self.config.group) if ahead else nullcontext() as flight:
            if flight:
                for number, part in enumerate(parts[done : done + ahead], done + 1):
                    self._ask(flight, number, part)
            for number in range(done + 1, len(parts) + 1):
                following = number - 1 + ahead
                yield self.step(number, parts[following] if following < len(parts) else (), flight)

    def step(self, number: int, asked: Sequence[Problem], flight: Flight | None = None) -> Step:
        """Samples a group of responses to each problem, grades them, compares within the group, learns, publishes."""
        config, sampled_by = self.config, self.publisher.weight_version
        clock = Clock(settle=self.policy.settle, ended=self.ended)

        with clock.phase("rollout"):
            batch = flight.take(config.prompts) if flight else self._rolled_out(number, asked)
            if flight:
                self._ask(flight, number + AHEAD[config.rollouts], asked)

        with clock.phase("grade"):
            rollouts = batch.sampled.all
            graded = zip(batch.problems, rollouts, strict=True)
            rewards = [float(self.grade(problem, rollout.text)) for problem, rollout in graded]
            advantages = group_advantages(rewards, config.group, config.scale)
            old = [ages(each, number - 1) if flight else () for each in rollouts]
            trajectories = [
                Trajectory(prompt, each.tokens, each.logprobs or (), advantage, age)
                for prompt, each, advantage, age in zip(batch.prompts, rollouts, advantages, old, strict=True)
            ]

        drafting = Drafting(config, self.policy, clock, number)
        drafting.beside("learn")
        learnt = self._learnt(number, trajectories, clock)
        drafting.beside("publish")
        with clock.phase("publish"):
            self.publisher.publish(self.policy, str(number))
        drafted = drafting.end()

        with clock.phase("keep"):
            if number % config.checkpoint_every == 0 or number == config.steps:
                self.policy.keep(config.out / STATE, number)
        said = {"drafter_steps": drafted, **aged([age for each in old for age in each], config.max_age)}
        return Step.of(number, sampled_by, batch.sampled, rewards, learnt, clock.seconds(), said)

    def held_out(self, number: int) -> HeldOut:
        """Answers problems that it is never trained on, once each, sampled as rollouts are."""
        asked = problems(self.config.held_out, self.config.seed)
        sampled = self.roll_out([self.policy.tokens(problem.prompt) for problem in asked], "held out")
        right = [self.grade(problem, rollout.text) for problem, rollout in zip(asked, sampled.all, strict=True)]
        return HeldOut(step=number, problems=len(asked), accuracy=statistics.fmean(right))

    def roll_out(self, prompts: Sequence[tuple[int, ...]], what: str) -> Rollouts:
        """A response to each by the policy as it is, with seeds that follow from the run's and `what`. A server that
        does not have the policy was restarted, and is sent it again, once."""
        params = self._params(len(prompts), what)
        try:
            return roll_out(self.client, prompts, params, self.publisher.weight_version)
        except VersionConflict as conflict:
            logger.warning("the server has other weights, and is sent the policy again: %s", conflict)
            self.publisher.again(self.policy)
            return roll_out(self.client, prompts, params, self.publisher.weight_version)

    def _rolled_out(self, number: int, asked: Sequence[Problem]) -> Batch:
        each = [problem for problem in asked for _ in range(self.config.group)]
        prompts = [self.policy.tokens(problem.prompt) for problem in each]
        return Batch(each, prompts, self.roll_out(prompts, f"step {number}"))

    def _ask(self, flight: Flight, number: int, asked: Sequence[Problem]) -> None:
        """For what step `number` would have sampled."""
        size = self.config.group
        params = self._params(len(asked) * size, f"step {number}")
        for i, problem in enumerate(asked):
            flight.ask(problem, self.policy.tokens(problem.prompt), params[i * size : (i + 1) * size])

    def _params(self, count: int, what: str) -> list[SamplingParams]:
        config, seed = self.config, zlib.crc32(f"{self.config.seed} {what}".encode())
        return [sampling(config.temperature, config.max_new_tokens, sample_seed(seed, i)) for i in range(count)]

    def _learnt(self, number: int, trajectories: Sequence[Trajectory], clock: Clock) -> Learnt | None:
        """Without the server's memory in the way, if it is to be released."""
        if self.config.offload:
            with clock.phase("offload"):
                self.client.release_memory_occupation()
        with clock.phase("learn"):
            learnt = self.policy.learn(trajectories, number)
        if self.config.offload:
            with clock.phase("offload"):
                self.policy.rest()
                self.client.resume_memory_occupation()
        return learnt


def begin(config: Config, client: Client, *, resume: bool = False) -> tuple[Training, int]:
    """What all steps share, and how many of them are done: with `resume`, those before the state in `out`."""
    policy = Policy(config)
    done = policy.go_on(config.out / STATE) if resume else 0
    publisher = Publisher(client, config.out, config.publish, in_flight=config.rollouts != "on_policy")
    return Training(config, client, policy, publisher), done


def go(training: Training, done: int, tell: Callable[[Line], None]) -> Path:
    """Takes the steps that are left; where the last policy lies. `tell` is given each line of the log as it comes."""
    config, publisher = training.config, training.publisher
    publisher.publish(training.policy, str(done))  # so that server and trainer begin from the same weights
    asked = training_problems(config.steps * config.prompts, config.seed)
    if config.held_out and not done:
        tell(training.held_out(0))
    with closing(training.steps(done, asked)) as steps:
        for step in steps:
            tell(step)
    if config.held_out:
        tell(training.held_out(config.steps))
    publisher.close()
    return publisher.save(training.policy)


def train(config: Config, client: Client, tell: Callable[[Line], None], *, resume: bool = False) -> Path:
    """A run from its first step, or behind the last one that is kept, to its end."""
    return go(*begin(config, client, resume=resume), tell)
