"""What all runs of a comparison have in common, and which arms there are."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tlt_grpo.config import Config, Mode

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
"""Take as many steps as a comparison of policies needs, and as many more as do not count."""
ON_POLICY, OFFLOAD = "on_policy", "offload"
MODES = (ON_POLICY, OFFLOAD, "one_step_off", "partial")
"""How arms OFF and FROZEN take their steps; others do on policy alone. OFFLOAD: on policy, without the server's memory
while the policy learns. The last two: in flight, as tlt-grpo has it."""
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
    modes: tuple[str, ...] = (ON_POLICY,)
    packs: int = 1
    """That a drafter is trained with in a step, where one is: of 4,096 tokens on a GPU, a step of 4 x 8 has 5,000."""
    judged_every: int = 4
    """Steps: a judgement takes as long as several packs."""
    held_out: int = 256
    """Problems that are answered once each when a run is over."""
    learning_rate: float = 1e-5
    max_new_tokens: int | None = None
    """Of a response; None: as the workload says."""
    checkpointing: bool = False
    apart: bool = False
    """The policy learns on a second GPU, and the drafter meanwhile on the server's, which has drained by then."""
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
        return min(self.steps, self.uncounted + COMPARED_STEPS[-1])

    def steps_of(self, arm: str) -> int:
        return self.brief_steps if arm in BRIEF else self.steps

    def runs(self, arms: Sequence[str], seed: int) -> Iterator[tuple[str, str]]:
        """Modes and arms of one server, in another order for each seed."""
        for mode in self.modes:
            for arm in rotated(arms, seed):
                if mode == ON_POLICY or arm in (OFF, FROZEN):
                    yield mode, arm

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
            batch_tokens=16_384 if self.checkpointing else 2_048,  # of 7B, 6 MB of activations a token
            checkpointing=self.checkpointing,
            publish="broadcast" if self.apart else "tensor",
            drafter_beside="learn" if self.apart else "publish",
            drafter_steps=self.packs,
            drafter_judged_every=self.judged_every,
            device=("cuda:1" if self.apart else "cuda") if has_gpu() else "cpu",
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
    modes=MODES,
    packs=2,
    judged_every=1,
    held_out=8,
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
        modes=(ON_POLICY,),
    )


def rollouts(mode: str) -> Mode:
    """As tlt-grpo calls it."""
    return "one_step_off" if mode == "one_step_off" else "partial" if mode == "partial" else "on_policy"


def what(plan: Plan, workload: str, mode: str = ON_POLICY) -> str:
    """A step's batch, in the figures' names: `4x8`, `4x8_long`, `4x8_change`, `4x8_apart_partial`."""
    ends = (
        "" if workload == "demo" else f"_{workload}",
        "" if plan.change_after is None else "_change",
        "_apart" if plan.apart else "",
        "" if mode == ON_POLICY else f"_{mode}",
    )
    return f"{plan.prompts}x{plan.group}{''.join(ends)}"


def rotated(arms: Sequence[str], seed: int) -> list[str]:
    """The order of arms, another for each seed."""
    first = seed % len(arms)
    return [*arms[first:], *arms[:first]]
