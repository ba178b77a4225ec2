"""Arms, the buckets of batch sizes that they compete in, and the table that says what every rank does next."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from tlt_server.config import Arm

Choice = Arm | None
"""An arm, or None: off, which is plain decoding and an arm like any other."""


def is_chain(arm: Arm) -> bool:
    """Whether a draft has no branches, so that a deeper one begins with it."""
    return arm.topk == 1


class Bucket(msgspec.Struct, frozen=True):
    """Batch sizes from `first` to the next bucket's first, and the arms that compete there, the preferred one first."""

    first: int
    arms: tuple[Choice, ...]


class ArmTable(msgspec.Struct, frozen=True, array_like=True):
    """One arm for each bucket: all that ranks must agree on.

    Rank 0 alone times, learns and draws. What it decides is this table, a few dozen bytes, that it sends to the others
    where it has changed, with the requests that a scheduler's loop broadcasts anyway; exploration is drawn into it
    beforehand. All ranks see the same batch size, so the same lookup gives all the same arm, without a word between
    them in the step. A table that comes late is merely an old decision.

    firsts: each bucket's first batch size, ascending from 1.
    arms: each bucket's arm.
    """

    firsts: tuple[int, ...]
    arms: tuple[Choice, ...]

    def arm(self, batch: int) -> Choice:
        """The arm for a batch of so many requests."""
        return self.arms[bisect_right(self.firsts, batch) - 1]


class Buckets:
    """A server's buckets.

    buckets: ascending from batch size 1.
    largest: batch size that the server runs at most, where the last bucket ends.
    """

    def __init__(self, buckets: Sequence[Bucket], largest: int) -> None:
        self.all = tuple(buckets)
        self.firsts = tuple(bucket.first for bucket in buckets)
        self._lasts = (*(first - 1 for first in self.firsts[1:]), largest)

    def index(self, batch: int) -> int:
        """Which bucket a batch size belongs to."""
        return bisect_right(self.firsts, batch) - 1

    def sizes(self, batch: int) -> range:
        """All batch sizes of the bucket that this one belongs to."""
        index = self.index(batch)
        return range(self.firsts[index], self._lasts[index] + 1)

    def last(self, index: int) -> int:
        """A bucket's last batch size."""
        return self._lasts[index]

    def table(self, arms: Sequence[Choice]) -> ArmTable:
        """What each bucket does."""
        return ArmTable(self.firsts, tuple(arms))


def pinned_table(arm: Choice, captured: Mapping[Arm, int]) -> ArmTable:
    """One arm at every batch size that it was captured for, and off above them.

    captured: the largest batch size of each arm's CUDA graphs. Beyond it an arm would run without them, correct and
        slower than plain decoding.
    """
    return ArmTable((1,), (None,)) if arm is None else ArmTable((1, captured[arm] + 1), (arm, None))


def by_verified_tokens(arms: Sequence[Arm], firsts: Sequence[int] = (1, 2, 5, 21)) -> list[Bucket]:
    """Buckets as the paper makes them: arms that verify equally many tokens share one, the most for few requests.

    firsts: each bucket's first batch size, as published. Where there are more groups than buckets, the groups that
        verify fewest are left out; where there are fewer, the last one serves all larger batches.
    """
    groups: dict[int, list[Arm]] = {}
    for arm in sorted(arms, key=lambda arm: -arm.num_draft_tokens):
        groups.setdefault(arm.num_draft_tokens, []).append(arm)
    return [Bucket(first, tuple(group)) for first, group in zip(firsts, groups.values(), strict=False)]
