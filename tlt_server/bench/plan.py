"""What a bench asks of a server, known before it asks anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from tlt_client import SamplingParams, schemas
from tlt_client.wire import Prompt

from tlt_server.errors import ConfigError

OFF, BANDIT = "off", "bandit"
WARM_UP_S = 1.0
"""Of each side at each load, not counted: caches fill, kernels are compiled."""


@dataclass(frozen=True)
class Side:
    """One way to decode. most: requests at once that it is asked; an arm has CUDA graphs up to so many."""

    name: str
    strategy: schemas.StrategyUpdate
    most: float = inf


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Each round asks every side at every load for so many seconds: `load` requests are always in flight, each to its
    natural end or `sampling.max_new_tokens`; what is in flight at the end is aborted.

    Raises ConfigError: a number that cannot be.
    """

    url: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    loads: Sequence[int]
    seconds: float
    rounds: int

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) < 1 or len(set(self.loads)) < len(self.loads):
            raise ConfigError(f"--concurrency {','.join(map(str, self.loads))}: needs different numbers from 1 on")
        if not self.seconds >= 1:
            raise ConfigError(f"--seconds {self.seconds}: needs 1 at least, or a few steps would decide")

    def turns(self, sides: Sequence[Side]) -> list[tuple[Side, int]]:
        """A round's, in order."""
        return [(side, load) for load in self.loads for side in sides if load <= side.most]

    def told(self, sides: Sequence[Side]) -> str:
        """What it will ask, in words."""
        turns = len(self.turns(sides))
        return (
            f"{self.url} will be asked for about {turns * (self.rounds * self.seconds + WARM_UP_S):.0f} s: "
            f"{', '.join(side.name for side in sides)}; {' and '.join(map(str, self.loads))} requests in flight, of at "
            f"most {self.sampling.max_new_tokens} tokens each; {self.rounds} rounds of {self.seconds:g} s. Meanwhile "
            "its strategy changes; it is set back at the end."
        )


def counts(text: str) -> list[int]:
    """`1,8,32`, read. ConfigError: it is something else."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--concurrency {text}: write numbers with commas between, as in 1,8,32") from error


def sides_of(speculation: schemas.Speculation, *, arms: bool) -> list[Side]:
    """Plain decoding first, then the bandit, then each arm by itself.

    Raises ConfigError: the server has nothing to compare.
    """
    if not speculation.arms:
        raise ConfigError("the server has no drafter, so there is nothing to compare: start it with --drafter")
    largest = {each.arm: each.largest for each in speculation.graphs.arms} if speculation.graphs else {}
    alone = [
        Side(name_of(arm), schemas.StrategyUpdate("pinned", pinned=arm), largest.get(arm, inf))
        for arm in speculation.arms
    ]
    return [Side(mode, schemas.StrategyUpdate(mode)) for mode in (OFF, BANDIT)] + (alone if arms else [])


def name_of(arm: schemas.Arm) -> str:
    return str(arm)


def present(speculation: schemas.Speculation) -> schemas.StrategyUpdate:
    """The strategy that a server has now, to be set back."""
    known = speculation.selection
    if known is None:
        return schemas.StrategyUpdate(speculation.mode)
    return schemas.StrategyUpdate(
        mode=speculation.mode,
        pinned=known.buckets[0].active if speculation.mode == "pinned" else None,
        buckets=tuple(
            schemas.SelectionBucket(bucket.first, tuple(each.arm for each in bucket.arms)) for bucket in known.buckets
        ),
        epsilon=known.epsilon,
        window=known.window,
        exploration=known.exploration,
    )
