"""What steps may cost, before any was timed: shares of a plain step, as measured on one H200.

Only ratios count, and those only until an arm was pulled: a pace (paces.py) is measured against them. A 7B target
in bf16 with 320 tokens of context takes 4.7 ms for a plain step at batch 1; benchmarks/README.md has the table.
"""

from collections.abc import Sequence

from tlt_server.config import Arm
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts, Timing

_PLAIN_S = 0.0047
_PASS, _TOKEN = 0.16, 0.004
"""Of a plain step: a pass of the drafter, and a token that the target verifies."""


def guessed_costs(arms: Sequence[Arm], largest: int) -> StepCosts:
    """Of these arms and of off, at batches up to `largest`."""
    return StepCosts(
        Timing(arm, batch, 0, _PLAIN_S * _share(arm, batch)) for arm in (None, *arms) for batch in {1, largest}
    )


def _share(arm: Choice, batch: int) -> float:
    return 1 + _TOKEN * batch if arm is None else 1 + _PASS * arm.num_steps + _TOKEN * batch * arm.num_draft_tokens
