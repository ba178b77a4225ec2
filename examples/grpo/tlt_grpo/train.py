"""A run. `Training.step` reads as the algorithm does."""

import logging
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_client import Client, sample_seed
from tlt_client.errors import VersionConflict
from tlt_server.demo.task import Problem, grade, problems, training_problems

from tlt_grpo.clock import Clock
from tlt_grpo.config import Config
from tlt_grpo.learning.advantages import group_advantages
from tlt_grpo.learning.batches import Trajectory
from tlt_grpo.learning.policy import Policy
from tlt_grpo.log import HeldOut, Line, Step
from tlt_grpo.publishing import Publisher
from tlt_grpo.rollouts import Rollouts, roll_out, sampling

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

    def step(self, number: int, asked: Sequence[Problem]) -> Step:
        """Samples a group of responses to each problem, grades them, compares within the group, learns, publishes."""
        config, sampled_by = self.config, self.publisher.weight_version
        clock = Clock(settle=self.policy.settle, ended=self.ended)

        with clock.phase("rollout"):
            each = [problem for problem in asked for _ in range(config.group)]
            prompts = [self.policy.tokens(problem.prompt) for problem in each]
            sampled = self.roll_out(prompts, f"step {number}")

        with clock.phase("grade"):
            graded = zip(each, sampled.all, strict=True)
            rewards = [float(self.grade(problem, rollout.text)) for problem, rollout in graded]
            advantages = group_advantages(rewards, config.group, config.scale)
            trajectories = [
                Trajectory(prompt, rollout.tokens, rollout.logprobs or (), advantage)
                for prompt, rollout, advantage in zip(prompts, sampled.all, advantages, strict=True)
            ]

        with clock.phase("learn"):
            learnt = self.policy.learn(trajectories, number)

        with clock.phase("publish"):
            self.publisher.publish(self.policy, str(number))

        with clock.phase("keep"):
            if number % config.checkpoint_every == 0 or number == config.steps:
                self.policy.keep(config.out / STATE, number)
        return Step.of(number, sampled_by, sampled, rewards, learnt, clock.seconds())

    def held_out(self, number: int) -> HeldOut:
        """Answers problems that it is never trained on, once each, sampled as rollouts are."""
        asked = problems(self.config.held_out, self.config.seed)
        sampled = self.roll_out([self.policy.tokens(problem.prompt) for problem in asked], "held out")
        right = [self.grade(problem, rollout.text) for problem, rollout in zip(asked, sampled.all, strict=True)]
        return HeldOut(step=number, problems=len(asked), accuracy=statistics.fmean(right))

    def roll_out(self, prompts: Sequence[tuple[int, ...]], what: str) -> Rollouts:
        """A response to each by the policy as it is, with seeds that follow from the run's and `what`. A server that
        does not have the policy was restarted, and is sent it again, once."""
        config, seed = self.config, zlib.crc32(f"{self.config.seed} {what}".encode())
        params = [
            sampling(config.temperature, config.max_new_tokens, sample_seed(seed, i)) for i in range(len(prompts))
        ]
        try:
            return roll_out(self.client, prompts, params, self.publisher.weight_version)
        except VersionConflict as conflict:
            logger.warning("the server has other weights, and is sent the policy again: %s", conflict)
            self.publisher.again(self.policy)
            return roll_out(self.client, prompts, params, self.publisher.weight_version)


def begin(config: Config, client: Client, *, resume: bool = False) -> tuple[Training, int]:
    """What all steps share, and how many of them are done: with `resume`, those before the state in `out`."""
    policy = Policy(config)
    done = policy.go_on(config.out / STATE) if resume else 0
    return Training(config, client, policy, Publisher(client, config.out, config.publish)), done


def go(training: Training, done: int, tell: Callable[[Line], None]) -> Path:
    """Takes the steps that are left; where the last policy lies. `tell` is given each line of the log as it comes."""
    config, publisher = training.config, training.publisher
    publisher.publish(training.policy, str(done))  # so that server and trainer begin from the same weights
    asked = training_problems(config.steps * config.prompts, config.seed)
    if config.held_out and not done:
        tell(training.held_out(0))
    for number in range(done + 1, config.steps + 1):
        tell(training.step(number, asked[(number - 1) * config.prompts : number * config.prompts]))
    if config.held_out:
        tell(training.held_out(config.steps))
    publisher.close()
    return publisher.save(training.policy)


def train(config: Config, client: Client, tell: Callable[[Line], None], *, resume: bool = False) -> Path:
    """A run from its first step, or behind the last one that is kept, to its end."""
    return go(*begin(config, client, resume=resume), tell)
