"""Arms, the buckets of batch sizes that they compete in, and the table that says what every rank does next."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import msgspec

from tlt_server.config import Arm

Choice = Arm | None
"""An arm, or None: off, which is plain decoding and an arm like any other."""

PLAIN, VERIFICATION, DRAFTING, DRAFT_EXTEND = "plain", "verification", "drafting", "draft-extend"
KEYS: Mapping[str, Callable[[Arm], Hashable]] = {
    VERIFICATION: lambda arm: (arm.num_draft_tokens, is_chain(arm)),
    DRAFTING: lambda arm: arm.source if arm.of_history else arm,
    DRAFT_EXTEND: lambda arm: arm.num_steps,
}
"""The passes of a speculative step, and what of an arm each depends on. What history drafts takes none."""


def alike(kind: str, arm: Arm, arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """Those of `arms` that can have this arm's pass."""
    return tuple(other for other in arms if KEYS[kind](other) == KEYS[kind](arm))


def is_chain(arm: Arm) -> bool:
    """Whether a draft has no branches, so that a deeper one begins with it."""
    return arm.topk == 1


class Bucket(msgspec.Struct, frozen=True):
    """Batch sizes from `first` to the next bucket's first, and the arms that compete there, the preferred one first."""

    first: int
    arms: tuple[Choice, ...]


class ArmTable(msgspec.Struct, frozen=True, array_like=True):
    """One arm for each bucket, whose first batch sizes ascend from 1: all that ranks must agree on."""

    firsts: tuple[int, ...]
    arms: tuple[Choice, ...]

    def arm(self, batch: int) -> Choice:
        """The arm for a batch of so many requests."""
        return self.arms[bisect_right(self.firsts, batch) - 1]


class Buckets:
    """A server's buckets, ascending from batch size 1; the last ends at the `largest` that the server runs."""

    def __init__(self, buckets: Sequence[Bucket], largest: int) -> None:
        self.all = tuple(buckets)
        self.firsts = tuple(bucket.first for bucket in buckets)
        self.lasts = (*(first - 1 for first in self.firsts[1:]), largest)

    def index(self, batch: int) -> int:
        """Which bucket a batch size belongs to."""
        return bisect_right(self.firsts, batch) - 1


def pinned_table(arm: Choice, captured: Mapping[Arm, int]) -> ArmTable:
    """One arm up to the largest batch size that it was captured for, and off above: without graphs it would be slow."""
    return ArmTable((1,), (None,)) if arm is None else ArmTable((1, captured[arm] + 1), (arm, None))


def undrafted(buckets: Buckets) -> Buckets:
    """The same without the drafter's arms; off where there are no others."""
    left = [Bucket(each.first, tuple(arm for arm in each.arms if not arm or arm.of_history)) for each in buckets.all]
    return Buckets([each if each.arms else Bucket(each.first, (None,)) for each in left], buckets.lasts[-1])
