"""What a server has learned, as JSON can hold it: written when it ends, read when it starts again."""

import msgspec

from tlt_server.strategy.arms import Choice


class LearnedPart(msgspec.Struct, frozen=True):
    """A tree's lead, or the level, of no arm: log-odds, and their variance."""

    arm: Choice
    mean: float
    variance: float


class LearnedAcceptance(msgspec.Struct, frozen=True):
    """What acceptance.py knows: the curve's trials and hits by position, level and leads."""

    trials: tuple[float, ...]
    hits: tuple[float, ...]
    parts: tuple[LearnedPart, ...]


class LearnedPace(msgspec.Struct, frozen=True):
    """Step times of an arm in the bucket that begins at batch size `first`: measured over expected, oldest first."""

    first: int
    arm: Choice
    ratios: tuple[float, ...]


class Learned(msgspec.Struct, frozen=True):
    """All that is worth keeping. The paper's rewards are not: a tokens/s is of one moment's batch and context."""

    acceptance: LearnedAcceptance
    paces: tuple[LearnedPace, ...]
