"""BEG-MAB, the bucketed epsilon-greedy bandit of TLT (arXiv 2511.16665), as published: mode `paper`.

Inside the bucket of the batch size, with probability epsilon an arm drawn evenly from all, else the one whose rewards
(accept length * batch size / step seconds) have the highest median over a sliding window of its pulls. What the paper
does not say: an arm without a reward has none to win with, and among equals the first wins.
"""

from collections import deque
from random import Random
from statistics import median

from tlt_server.strategy.arms import ArmTable, Buckets, Choice


class BegMab:
    """The paper's bandit. epsilon: how often it explores. window: rewards that an arm keeps in a bucket."""

    def __init__(self, buckets: Buckets, random: Random, epsilon: float = 0.1, window: int = 300) -> None:
        self._buckets, self._random, self._epsilon = buckets, random, epsilon
        self._rewards: list[dict[Choice, deque[float]]] = [
            {arm: deque(maxlen=window) for arm in bucket.arms} for bucket in buckets.all
        ]
        self._medians: dict[tuple[int, Choice], float] = {}  # taken where they are asked for
        self._drawn = [self._draw(bucket) for bucket in range(len(buckets.all))]

    def table(self) -> ArmTable:
        """What each bucket does next: the arm drawn for exploration, or the best."""
        arms = (drawn[0] if drawn else self._best(bucket) for bucket, drawn in enumerate(self._drawn))
        return ArmTable(self._buckets.firsts, tuple(arms))

    def launched(self, batch: int) -> None:
        """A step begins; its bucket draws anew."""
        bucket = self._buckets.index(batch)
        self._drawn[bucket] = self._draw(bucket)

    def settled(self, arm: Choice, batch: int, accept_length: float, seconds: float) -> None:
        """A step's reward; an arm that is no longer in its bucket gets none."""
        bucket = self._buckets.index(batch)
        if (rewards := self._rewards[bucket].get(arm)) is not None:
            rewards.append(accept_length * batch / seconds)
            self._medians.pop((bucket, arm), None)

    def median_reward(self, bucket: int, arm: Choice) -> float | None:
        """Tokens per second; None before the first pull."""
        if (bucket, arm) not in self._medians and (rewards := self._rewards[bucket][arm]):
            self._medians[bucket, arm] = median(rewards)
        return self._medians.get((bucket, arm))

    def _best(self, bucket: int) -> Choice:
        return max(self._rewards[bucket], key=lambda arm: self.median_reward(bucket, arm) or 0.0)

    def _draw(self, bucket: int) -> tuple[Choice] | None:
        arms = self._buckets.all[bucket].arms
        return (self._random.choice(arms),) if len(arms) > 1 and self._random.random() < self._epsilon else None
