"""With several arms: switching among them is no change of drafter, and a change of drafter is seen in any of them."""

from random import Random
from typing import Any

import pytest

from tlt_server.config import Arm, Watchfulness
from tlt_server.engine.weights.watchdog import Watchdog

SHALLOW, DEEP = Arm(3, 1, 4), Arm(7, 4, 24)
REQUESTS = 8


def dogs() -> Watchdog:
    return Watchdog([SHALLOW, DEEP], Watchfulness.ARMED, 1.2, lambda: 0.0)


def decode(made: Watchdog, draw: Random, steps: int, rate: float, deep: float = 0.5) -> list[dict[str, Any]]:
    """Steps whose arm is drawn anew each time, `deep` of them the deep one; each draft is accepted at one rate."""
    found = []
    for _ in range(steps):
        arm = DEEP if draw.random() < deep else SHALLOW
        accepted = []
        for request in range(REQUESTS):
            count = 0
            while count < arm.num_steps and draw.random() < rate:
                count += 1
            accepted.append((str(request), count))
        if (finding := made.observe(arm, accepted)) is not None:
            found.append(finding)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_another_mix_of_arms_is_no_worse_drafter(seed: int) -> None:
    """The share of accepted drafts is 0.54 in the one arm and 0.29 in the other, whatever the drafter."""
    made, draw = dogs(), Random(seed)
    assert decode(made, draw, 1500, 0.7, deep=0.2) == []
    assert made.describe().state == "settled"
    made.hear("drafter")
    assert not made.trusted
    found = decode(made, draw, 3000, 0.7, deep=0.9)
    assert [finding["worse"] for finding in found] == [False] * len(found)
    assert made.trusted


@pytest.mark.parametrize("deep", [0.05, 0.95])
def test_a_worse_drafter_is_found_by_the_arm_that_runs(deep: float) -> None:
    made, draw = dogs(), Random(1)
    decode(made, draw, 2000, 0.8)
    made.hear("drafter")
    found = decode(made, draw, 300, 0.1, deep)
    assert found[0]["worse"]
    made.hear("rollback", trusted=True)
    assert made.trusted
    assert decode(made, draw, 2000, 0.8) == []


def test_it_says_what_the_newest_arm_sees() -> None:
    made = dogs()
    decode(made, Random(2), 200, 0.9, deep=1.0)
    made.mode = Watchfulness.OBSERVE
    watch = made.describe()
    assert (watch.mode, watch.state) == ("observe", "settled")
    assert (watch.accept_length or 0) > 1 + SHALLOW.num_steps
