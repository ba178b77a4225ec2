"""What a server has learned, as JSON can hold it: read from one that ends, given to one that starts.

Whatever is given is decoded by these types, which hold what arithmetic can go on from.
"""

from typing import Annotated

import msgspec

from tlt_server.strategy.arms import Choice

Count = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class LearnedPart(msgspec.Struct, frozen=True):
    """A tree's lead, or the level, of no arm: log-odds, and their variance."""

    arm: Choice
    mean: Annotated[float, msgspec.Meta(ge=-100, le=100)]
    variance: Annotated[float, msgspec.Meta(ge=0, le=100)]


class LearnedAcceptance(msgspec.Struct, frozen=True):
    """What acceptance.py knows: the curve's trials and hits by position, level and leads."""

    trials: tuple[Count, ...]
    hits: tuple[Count, ...]
    parts: tuple[LearnedPart, ...]

    def __post_init__(self) -> None:
        if len(self.hits) != len(self.trials) or any(h > t for h, t in zip(self.hits, self.trials, strict=True)):
            raise ValueError(f"hits {self.hits} of trials {self.trials}: as many numbers, and none above its trials")


class LearnedPace(msgspec.Struct, frozen=True):
    """Step times of an arm in the bucket that begins at batch size `first`: the logarithm of how many times as long as
    timing said they are."""

    first: Annotated[int, msgspec.Meta(ge=1)]
    arm: Choice
    mean: Annotated[float, msgspec.Meta(ge=-14, le=14)]


class LearnedReading(msgspec.Struct, frozen=True):
    """What the drafter missed and read, tokens, and how long it took."""

    tokens: Count
    seconds: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class Learned(msgspec.Struct, frozen=True):
    """All that is worth keeping. The paper's rewards are not: a tokens/s is of one moment's batch and context."""

    acceptance: LearnedAcceptance
    paces: tuple[LearnedPace, ...]
    reading: LearnedReading
