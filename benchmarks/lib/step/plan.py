"""What all runs of a comparison have in common, and which arms there are."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tlt_grpo.config import Config

from benchmarks.lib.adaptation.policy import Lesson
from tlt_server.launch import has_gpu

OFF, STATIC, FROZEN, ONLINE, MUTED, PLAIN, AGAIN = "off", "static", "frozen", "online", "muted", "plain", "again"
ARMS = (OFF, STATIC, FROZEN, ONLINE, MUTED, PLAIN, AGAIN)
"""Of a comparison, not of a drafter:

off      the server with drafter and arms, decoding plainly
static   the arm that drains the first step's batch soonest
frozen   the bandit, the drafter as it is
online   the bandit, the drafter being trained beside it and published
muted    as online, but nothing is ever published: what training itself costs
plain    a server without a drafter
again    as off, with other seeds of sampling: by how much two runs differ that differ by nothing else
"""
TRAINED = (ONLINE, MUTED)
BRIEF = (PLAIN, AGAIN)
"""Take as many steps as a comparison of policies needs."""
COMPARED_STEPS = (1, 2, 3, 5)
"""After which policies are compared."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run of each arm."""

    steps: int = 20
    uncounted: int = 3
    """Of them, at the beginning: kernels are chosen, memory is taken, the bandit knows nothing."""
    prompts: int = 4
    group: int = 8
    replayed: tuple[int, ...] = (8, 16)
    """Prompts of larger steps, whose times are replayed."""
    learning_rate: float = 1e-5
    max_new_tokens: int | None = None
    """Of a response; None: as the workload says."""
    checkpointing: bool = False
    compared: int = 64
    """Sequences that policies are compared on."""
    change_after: int | None = None
    """Steps after which the task changes as in `benchmarks adaptation`; None: never. Those counted come after the
    lesson that is given then."""
    lesson_steps: int = 10
    lesson_updates: int = 8

    @property
    def lesson(self) -> Lesson | None:
        if self.change_after is None:
            return None
        first, last = self.change_after + 1, self.change_after + self.lesson_steps
        return Lesson(first, last, self.lesson_updates, rate=1e-3, solutions=32)

    @property
    def brief_steps(self) -> int:
        return min(self.steps, COMPARED_STEPS[-1])

    def steps_of(self, arm: str) -> int:
        return self.brief_steps if arm in BRIEF else self.steps

    def config(self, target: Path, longest: int, seed: int) -> Config:
        """Of the trainer. Groups of equal rewards are learnt from, too: a step costs what its tokens cost."""
        return Config(
            url="",
            model=str(target),
            out=Path(),
            steps=1 << 30,  # nothing is kept at the end of this many
            checkpoint_every=1 << 30,
            prompts=self.prompts,
            group=self.group,
            max_new_tokens=self.max_new_tokens or longest,
            learning_rate=self.learning_rate,
            all_responses=True,
            batch_tokens=16_384 if self.checkpointing else 4_096,  # of 7B, 6 MB of activations a token
            checkpointing=self.checkpointing,
            publish="tensor",
            device="cuda" if has_gpu() else "cpu",
            seed=seed,
        )


SMOKE = Plan(
    steps=3,
    uncounted=1,
    prompts=2,
    group=4,
    replayed=(4,),
    learning_rate=1e-4,
    max_new_tokens=128,
    compared=4,
    lesson_updates=1,
)


def changing(plan: Plan) -> Plan:
    """The same with a task that changes, in a run that is long enough for it."""
    after, lesson, then = (1, 1, 2) if plan == SMOKE else (10, 10, 10)
    return msgspec.structs.replace(
        plan,
        change_after=after,
        lesson_steps=lesson,
        uncounted=after + lesson,
        steps=after + lesson + then,
        replayed=(),
    )


def what(plan: Plan, workload: str) -> str:
    """A step's batch, in the figures' names: `4x8`, `4x8_long`, `4x8_change`."""
    ends = ("" if workload == "demo" else f"_{workload}", "" if plan.change_after is None else "_change")
    return f"{plan.prompts}x{plan.group}{''.join(ends)}"


def rotated(arms: Sequence[str], seed: int) -> list[str]:
    """The order of arms, another for each seed."""
    first = seed % len(arms)
    return [*arms[first:], *arms[:first]]
