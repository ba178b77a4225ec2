"""One run: GRPO on the embedded task, which changes in the middle."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from tlt_client import Client
from tlt_grpo.config import Config
from tlt_grpo.log import Line
from tlt_grpo.publishing import Publisher
from tlt_grpo.train import Training

from benchmarks.lib.adaptation.dialect import Dialect
from benchmarks.lib.adaptation.policy import Lesson, Pupil
from tlt_server.demo import default_paths
from tlt_server.demo.task import training_problems
from tlt_server.launch import has_gpu

OTHER_SIGNS = Dialect("*+=", "x&>")
"""What the reward asks for after the change: `6x7>42` where it was `6*7=42`. The sums are the same, but after every
second token comes another than before."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a comparison have in common."""

    steps: int = 60
    switch: int = 20
    """Steps before the task changes."""
    lesson_steps: int = 10
    """After it, in which worked solutions are imitated beside GRPO."""
    updates: int = 8
    """Of imitation, in each of these."""
    imitation_rate: float = 1e-3
    solutions: int = 32
    """That an update imitates: about 4,000 tokens."""
    learning_rate: float = 1e-4
    """GRPO's."""
    prompts: int = 16
    group: int = 8
    max_new_tokens: int = 512
    held_out: int = 1024
    control_rollouts: int = 4096
    """Of the first policy, that the control learns from."""

    def config(self, url: str, out: Path, seed: int) -> Config:
        """Of tlt-grpo."""
        shared = {name: getattr(self, name) for name in Config.__struct_fields__ if name in self.__struct_fields__}
        here = {"url": url, "model": str(default_paths()[0]), "out": out, "seed": seed}
        device = {"device": "cuda", "dtype": "bfloat16"} if has_gpu() else {}
        return Config(**shared | here | device)

    @property
    def lesson(self) -> Lesson:
        return Lesson(
            self.switch + 1, self.switch + self.lesson_steps, self.updates, self.imitation_rate, self.solutions
        )


def run(plan: Plan, url: str, out: Path, seed: int, tell: Callable[[Line], None]) -> None:
    """All steps, and then the held-out problems, graded as the task is then; `tell` is given each line of the log."""
    config = plan.config(url, out, seed)
    policy = Pupil(config, plan.lesson, OTHER_SIGNS)
    asked = training_problems(plan.steps * plan.prompts, seed)
    with Client(url) as client:
        training = Training(config, client, policy, Publisher(client, out))
        training.publisher.publish(policy, "0")
        for number in range(1, plan.steps + 1):
            if number == plan.switch + 1:
                training = replace(training, grade=OTHER_SIGNS.grade)
            tell(training.step(number, asked[(number - 1) * plan.prompts : number * plan.prompts]))
        tell(training.held_out(plan.steps))
