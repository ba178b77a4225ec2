"""The paper's bandit does what the paper says."""

from collections import Counter
from random import Random

import pytest

from tests.strategy.kit import BUCKETS, DEEP, LARGEST, SHALLOW, TREE
from tlt_server.strategy.arms import Bucket, Buckets
from tlt_server.strategy.beg_mab import BegMab

ONE_BUCKET = Buckets([Bucket(1, (SHALLOW, DEEP))], LARGEST)


def test_the_highest_median_wins_within_the_window() -> None:
    bandit = BegMab(ONE_BUCKET, Random(0), epsilon=0.0, window=3)
    for arm, seconds in ((SHALLOW, 1.0), (DEEP, 2.0), (DEEP, 2.0), (DEEP, 0.1)):
        bandit.settled(arm, 4, 2.0, seconds)
    assert bandit.table().arm(4) == SHALLOW  # DEEP's median is of one high reward and two low ones
    bandit.settled(DEEP, 4, 2.0, 0.1)
    assert bandit.table().arm(4) == DEEP
    assert bandit.median_reward(0, DEEP) == pytest.approx(80.0)


def test_epsilon_of_all_pulls_draw_evenly_from_all_arms() -> None:
    bandit = BegMab(ONE_BUCKET, Random(0), epsilon=0.2)
    bandit.settled(DEEP, 1, 2.0, 1.0)
    drawn: Counter[object] = Counter()
    for _ in range(5000):
        drawn[bandit.table().arm(1)] += 1
        bandit.launched(1)
    assert drawn[SHALLOW] / 5000 == pytest.approx(0.1, abs=0.02)


def test_a_bucket_with_one_arm_returns_it() -> None:
    bandit = BegMab(Buckets(BUCKETS, LARGEST), Random(0), epsilon=1.0)
    assert {bandit.table().arm(100) for _ in range(20)} == {None}


def test_a_median_at_batch_one_may_favour_the_slower_arm() -> None:
    """Why mode bandit takes means: TREE gives 1 token or 4, SHALLOW 2, in equal times."""
    bandit = BegMab(Buckets([Bucket(1, (SHALLOW, TREE))], LARGEST), Random(0), epsilon=0.0)
    for accept_length in (1, 1, 1, 4, 4) * 20:
        bandit.settled(TREE, 1, accept_length, 1.0)
        bandit.settled(SHALLOW, 1, 2, 1.0)
    assert bandit.table().arm(1) == SHALLOW
