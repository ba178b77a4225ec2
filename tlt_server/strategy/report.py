"""What came of each arm, for people to read; nothing is decided by it."""

from collections import defaultdict
from dataclasses import dataclass

from tlt_client import schemas

from tlt_server.strategy.arms import Buckets, Choice
from tlt_server.strategy.beg_mab import BegMab
from tlt_server.strategy.knowledge import Knowledge
from tlt_server.strategy.pulls import Pull
from tlt_server.strategy.settings import to_client


@dataclass
class _Tally:
    pulls: int = 0
    seconds: float = 0.0


class Tallies:
    """Decode steps whose time counted."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._by_arm: list[dict[Choice, _Tally]] = [defaultdict(_Tally) for _ in buckets.all]
        self._newest = [(buckets.last(bucket), 0) for bucket in range(len(buckets.all))]
        self.decoded_s = self.explored_s = 0.0

    def add(self, pull: Pull, seconds: float) -> None:
        """One step."""
        bucket = self._buckets.index(pull.batch)
        tally = self._by_arm[bucket][pull.arm]
        tally.pulls += 1
        tally.seconds += seconds
        self._newest[bucket] = pull.batch, pull.cached
        self.decoded_s += seconds
        self.explored_s += seconds if pull.charged else 0.0

    def bucket_report(self, bucket: int, in_force: Choice, knowledge: Knowledge, paper: BegMab) -> schemas.BucketReport:
        """A bucket, and what is expected of its arms at its newest step; before the first, at its largest batch."""
        batch, cached = self._newest[bucket]
        arms = []
        for arm in self._buckets.all[bucket].arms:
            tally = self._by_arm[bucket].get(arm, _Tally())
            arms.append(
                schemas.ArmReport(
                    arm=to_client(arm),
                    pulls=tally.pulls,
                    seconds=tally.seconds,
                    median_reward=paper.median_reward(bucket, arm),
                    expected_reward=knowledge.rate(arm, batch, cached),
                    accept_length=knowledge.acceptance.length(arm),
                    step_ms=1000 * knowledge.seconds(arm, batch, cached),
                )
            )
        first = self._buckets.firsts[bucket]
        return schemas.BucketReport(first, self._buckets.last(bucket), to_client(in_force), tuple(arms))
