"""BEG-MAB, the bucketed epsilon-greedy bandit of TLT (arXiv 2511.16665), as published: mode `paper`.

Inside the bucket of the batch size, with probability epsilon an arm drawn evenly from all, else the one whose rewards,
over a sliding window of its pulls, have the highest median. A bucket with one arm returns it. A reward is (accepted
drafts per request + 1) * batch size / step seconds: committed tokens per second.

What the paper does not say, we take as it is simplest: an arm without a reward has none to win with, and among equals
the first wins.
"""

from collections import deque
from random import Random
from statistics import median

from tlt_server.strategy.arms import ArmTable, Buckets, Choice


class BegMab:
    """The paper's bandit.

    epsilon: how often it explores, 0 to 1.
    window: rewards that an arm keeps in a bucket.
    """

    def __init__(self, buckets: Buckets, random: Random, epsilon: float = 0.1, window: int = 300) -> None:
        self._buckets = buckets
        self._random = random
        self._epsilon = epsilon
        self._rewards: list[dict[Choice, deque[float]]] = [
            {arm: deque(maxlen=window) for arm in bucket.arms} for bucket in buckets.all
        ]
        self._medians: list[dict[Choice, float]] = [dict.fromkeys(bucket.arms, 0.0) for bucket in buckets.all]
        self._stale: set[tuple[int, Choice]] = set()  # a median of hundreds is taken where it is asked for
        self._drawn = [self._draw(bucket) for bucket in range(len(buckets.all))]

    def table(self) -> ArmTable:
        """What each bucket does next: the arm drawn for exploration, or the best."""
        self._refresh()
        best = [max(medians, key=medians.__getitem__) for medians in self._medians]
        return self._buckets.table([drawn[0] if drawn else arm for drawn, arm in zip(self._drawn, best, strict=True)])

    def launched(self, batch: int) -> None:
        """A step begins; its bucket draws anew."""
        bucket = self._buckets.index(batch)
        self._drawn[bucket] = self._draw(bucket)

    def settled(self, arm: Choice, batch: int, accept_length: float, seconds: float) -> None:
        """A step's reward; an arm that is no longer in its bucket gets none."""
        bucket = self._buckets.index(batch)
        if (rewards := self._rewards[bucket].get(arm)) is not None:
            rewards.append(accept_length * batch / seconds)
            self._stale.add((bucket, arm))

    def median_reward(self, bucket: int, arm: Choice) -> float | None:
        """Tokens per second; None before the first pull."""
        self._refresh()
        return self._medians[bucket][arm] if self._rewards[bucket][arm] else None

    def _refresh(self) -> None:
        for bucket, arm in self._stale:
            self._medians[bucket][arm] = median(self._rewards[bucket][arm])
        self._stale.clear()

    def _draw(self, bucket: int) -> tuple[Choice] | None:
        """An arm to explore, or None for the best."""
        arms = self._buckets.all[bucket].arms
        return (self._random.choice(arms),) if len(arms) > 1 and self._random.random() < self._epsilon else None
