"""A run. `Training.step` reads as the algorithm does."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlt_client import Client
from tlt_client.errors import VersionConflict
from tlt_server.demo.task import Problem, grade, problems, training_problems

from tlt_grpo.advantages import group_advantages
from tlt_grpo.batches import Trajectory
from tlt_grpo.config import Config
from tlt_grpo.log import HeldOut, Line, Step
from tlt_grpo.policy import Policy
from tlt_grpo.publishing import Publisher
from tlt_grpo.rollouts import Rollouts, roll_out, sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """What the steps of a run share."""

    config: Config
    client: Client
    policy: Policy
    publisher: Publisher
    grade: Callable[[Problem, str], bool] = grade
    """Whether a response solves its problem: the reward."""

    def step(self, number: int, asked: Sequence[Problem]) -> Step:
        """Samples a group of responses to each problem, grades them, compares within the group, learns, publishes."""
        config, sampled_by = self.config, self.publisher.weight_version
        clock = [time.monotonic()]

        each = [problem for problem in asked for _ in range(config.group)]
        prompts = [self.policy.tokens(problem.prompt) for problem in each]
        sampled = self._roll_out(prompts)
        clock.append(time.monotonic())

        rewards = [float(self.grade(problem, rollout.text)) for problem, rollout in zip(each, sampled.all, strict=True)]
        advantages = group_advantages(rewards, config.group, config.scale)
        trajectories = [
            Trajectory(prompt, rollout.tokens, rollout.logprobs or (), advantage)
            for prompt, rollout, advantage in zip(prompts, sampled.all, advantages, strict=True)
        ]
        learnt = self.policy.learn(trajectories, number)
        clock.append(time.monotonic())

        self.publisher.publish(self.policy, str(number))
        clock.append(time.monotonic())
        return Step.of(number, sampled_by, sampled, rewards, learnt, clock)

    def held_out(self, number: int) -> HeldOut:
        """Answers problems that it is never trained on, once each, sampled as rollouts are."""
        asked = problems(self.config.held_out, self.config.seed)
        sampled = self._roll_out([self.policy.tokens(problem.prompt) for problem in asked])
        right = [self.grade(problem, rollout.text) for problem, rollout in zip(asked, sampled.all, strict=True)]
        return HeldOut(step=number, problems=len(asked), accuracy=statistics.fmean(right))

    def _roll_out(self, prompts: Sequence[tuple[int, ...]]) -> Rollouts:
        """By the policy as it is. A server that does not have it was restarted, and is sent it again, once."""
        params = sampling(self.config.temperature, self.config.max_new_tokens)
        try:
            return roll_out(self.client, prompts, params, self.publisher.weight_version)
        except VersionConflict as conflict:
            logger.warning("the server has other weights, and is sent the policy again: %s", conflict)
            self.publisher.again()
            return roll_out(self.client, prompts, params, self.publisher.weight_version)


def train(config: Config, client: Client, tell: Callable[[Line], None]) -> None:
    """Runs all steps. `tell` is given each line of the log as it comes to be."""
    policy = Policy(config)
    training = Training(config, client, policy, Publisher(client, config.out))
    training.publisher.publish(policy, "0")  # so that server and trainer begin from the same weights
    asked = training_problems(config.steps * config.prompts, config.seed)
    if config.held_out:
        tell(training.held_out(0))
    for number in range(1, config.steps + 1):
        tell(training.step(number, asked[(number - 1) * config.prompts : number * config.prompts]))
    if config.held_out:
        tell(training.held_out(config.steps))
