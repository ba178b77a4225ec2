"""A policy that is shown, for a few steps, how the changed task wants its answers."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tlt_grpo.batches import Trajectory, batches
from tlt_grpo.config import Config
from tlt_grpo.policy import LONGEST_GRADIENT, Learnt, Policy

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


class Pupil(Policy):
    """GRPO as in tlt_grpo; in the steps of a lesson, worked solutions of the dialect are imitated after it.

    GRPO learns from what the policy itself finds, and it never finds a way of writing that it was never shown: a reward
    that asks for one stays 0. So the change begins with supervised steps, each published and sampled as any RL step.
    """

    def __init__(self, config: Config, lesson: Lesson, dialect: Dialect) -> None:
        super().__init__(config)
        self._lesson, self._dialect = lesson, dialect
        # of its own: GRPO's moments are of other gradients
        self._imitating = torch.optim.AdamW(self.model.parameters(), lesson.rate, BETAS, weight_decay=0.0)

    def learn(self, trajectories: Sequence[Trajectory], step: int) -> Learnt | None:
        """What GRPO found; the lesson comes after it, for `trajectories` are of the policy before."""
        learnt = super().learn(trajectories, step)
        if self._lesson.first <= step <= self._lesson.last:
            for update in range(self._lesson.updates):
                self._imitate(f"{self._config.seed} {step} {update}")
        return learnt

    def solutions(self, seed: str) -> list[Trajectory]:
        """Worked solutions in the dialect of problems that are not held out, those that fit into a response."""
        draw, end = random.Random(seed), self.tokenizer.eos_token_id
        made = []
        for problem in training_problems(self._lesson.solutions, draw.getrandbits(32)):
            response = (*self.tokens(self._dialect.write(solve(problem, draw))), end)
            if len(response) <= self._config.max_new_tokens:
                made.append(Trajectory(self.tokens(problem.prompt), response, (0.0,) * len(response), 0.0))
        return made

    def _imitate(self, seed: str) -> None:
        """One step of the optimiser: cross-entropy, the mean over the tokens of responses."""
        shown = self.solutions(seed)
        total = sum(len(each.response) for each in shown)
        for batch in batches(shown, self._config.batch_tokens, self._config.device):
            (-(self.logprobs(batch.tokens) * batch.counts).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT)
        self._imitating.step()
        self._imitating.zero_grad()
