"""How much better a response is than the others to its problem."""

import statistics
from collections.abc import Sequence

from tlt_grpo.config import Scale

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], group: int, scale: Scale) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), over each `group` rewards that follow each other.

    This is GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), with the deviation of the population. With `scale`
    none it is not divided, as Dr. GRPO proposes (arXiv 2503.20783): dividing gives problems that are nearly always or
    nearly never solved more weight. A group of equal rewards gets zeros: it tells nothing.
    """
    groups = [rewards[first : first + group] for first in range(0, len(rewards), group)]
    return [advantage for each in groups for advantage in _of_one_group(each, scale)]


def _of_one_group(rewards: Sequence[float], scale: Scale) -> list[float]:
    mean = statistics.mean(rewards)  # exact: a rounded one would make equal rewards differ from it
    divisor = statistics.pstdev(rewards, mean) + EPSILON if scale == "std" else 1.0
    return [(reward - mean) / divisor for reward in rewards]
