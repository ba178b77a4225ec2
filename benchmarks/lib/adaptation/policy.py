"""A policy that is shown, for a few steps, how the changed task wants its answers."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from tlt_grpo.config import Config
from tlt_grpo.learning.batches import Trajectory, packs
from tlt_grpo.learning.optimiser import MasterAdamW, Optimiser
from tlt_grpo.learning.passes import pack_logprobs
from tlt_grpo.learning.policy import Learnt, Policy

from benchmarks.lib.adaptation.dialect import Dialect
from tlt_server.demo.task import solve, training_problems

BETAS = (0.9, 0.95)  # AdamW's for imitation, which is over after 80 updates


class Lesson(NamedTuple):
    """Supervised learning, in the steps `first` to `last`, both of them included.

    updates: of each step. rate: AdamW's. solutions: worked solutions that an update learns from.
    """

    first: int
    last: int
    updates: int
    rate: float
    solutions: int


class Lessons:
    """Worked solutions of a dialect, imitated in the steps of a lesson.

    GRPO learns from what the policy itself finds, and it never finds a way of writing that it was never shown: a reward
    that asks for one stays 0. So the change begins with supervised steps, each published and sampled as any RL step.
    """

    def __init__(self, lesson: Lesson, dialect: Dialect, config: Config) -> None:
        self._lesson, self._dialect, self._config = lesson, dialect, config

    def give(self, policy: Policy, model: Any, optimiser: Optimiser, step: int) -> None:
        """After a step of RL, if it is one of the lesson's. model, optimiser: what learns; the policy's, or another."""
        if self._lesson.first <= step <= self._lesson.last:
            for update in range(self._lesson.updates):
                self._imitate(policy, model, optimiser, f"{self._config.seed} {step} {update}")

    def solutions(self, policy: Policy, seed: str) -> list[Trajectory]:
        """Worked solutions in the dialect of problems that are not held out, those that fit into a response."""
        draw, end = random.Random(seed), policy.tokenizer.eos_token_id
        made = []
        for problem in training_problems(self._lesson.solutions, draw.getrandbits(32)):
            response = (*policy.tokens(self._dialect.write(solve(problem, draw))), end)
            if len(response) <= self._config.max_new_tokens:
                made.append(Trajectory(policy.tokens(problem.prompt), response, (0.0,) * len(response), 0.0))
        return made

    def _imitate(self, policy: Policy, model: Any, optimiser: Optimiser, seed: str) -> None:
        """One step of the optimiser: cross-entropy, the mean over the tokens of responses."""
        shown, config = self.solutions(policy, seed), self._config
        total = sum(len(each.response) for each in shown)
        for pack in packs(shown, config.batch_tokens, config.device):
            (-pack_logprobs(model, pack, config.temperature, config.head_rows).sum() / total).backward()
            optimiser.gather()
        optimiser.step()


class Pupil(Policy):
    """GRPO as in tlt_grpo, and lessons."""

    def __init__(self, config: Config, lesson: Lesson, dialect: Dialect) -> None:
        super().__init__(config)
        self.lessons = Lessons(lesson, dialect, config)
        # of its own: GRPO's moments are of other gradients
        self._imitating = MasterAdamW(self.masters, lesson.rate, BETAS)

    def learn(self, trajectories: Sequence[Trajectory], step: int) -> Learnt | None:
        """What GRPO found; the lesson comes after it, for `trajectories` are of the policy before."""
        learnt = super().learn(trajectories, step)
        self.lessons.give(self, self.model, self._imitating, step)
        return learnt
