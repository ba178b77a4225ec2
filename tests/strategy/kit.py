"""A selector over a made-up machine, small enough to reason about."""

from collections.abc import Mapping, Sequence
from random import Random

from tlt_server.config import Arm
from tlt_server.strategy.arms import Bucket, Choice
from tlt_server.strategy.costs import StepCosts, Timing
from tlt_server.strategy.selector import Selector

SHALLOW, DEEP, TREE = Arm(1, 1, 2), Arm(3, 1, 4), Arm(3, 2, 6)
CAPTURED = {SHALLOW: 64, DEEP: 64, TREE: 8}
LARGEST = 128
BUCKETS = (
    Bucket(1, (SHALLOW, DEEP, TREE, None)),
    Bucket(9, (SHALLOW, DEEP, None)),
    Bucket(65, (None,)),
)
MS = {None: 5.0, SHALLOW: 7.0, DEEP: 8.0, TREE: 10.0}  # of a step


def costs(ms: Mapping[Choice, float] = MS, sizes: Sequence[int] = (1, 128)) -> StepCosts:
    """The same at every batch size; timed at these."""
    return StepCosts(Timing(arm, batch, 0, each / 1000) for arm, each in ms.items() for batch in sizes)


def selector(seed: int = 0) -> Selector:
    """Just started."""
    return Selector(costs(), CAPTURED, LARGEST, BUCKETS, Random(seed))
