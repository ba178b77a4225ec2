"""Intervals: the middle 95 % of what a statistic is of runs drawn anew.

Runs (seeds) are drawn with replacement, then what is in each, so that an interval tells of runs as different as these.
Steps of one run resemble each other, and three runs are few: it is a measure of spread, not more.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np

from tlt_server.results import Figures

RESAMPLES = 2000

Sample = Callable[[np.random.Generator | None], float]
"""What a run says of something: as it is, or with what is in it drawn anew."""


def interval(
    name: str, samples: Mapping[str, Mapping[int, Sample]], statistic: Callable[[Mapping[str, float]], float]
) -> Figures:
    """A statistic of the arms' means over their runs, and its interval: `NAME_low`, `NAME_high`.

    Args:
        samples: by arm and seed. The same seeds are drawn for all arms, which are paired by them.
    """
    draw, seeds = np.random.default_rng(0), list(next(iter(samples.values())))

    def once(chosen: Sequence[int], draw: np.random.Generator | None) -> float:
        return statistic({arm: fmean(of_arm[seed](draw) for seed in chosen) for arm, of_arm in samples.items()})

    resampled = [once(draw.choice(seeds, len(seeds)).tolist(), draw) for _ in range(RESAMPLES)]
    low, high = np.percentile(resampled, (2.5, 97.5))
    return {name: once(seeds, None), f"{name}_low": float(low), f"{name}_high": float(high)}


def alone(name: str, samples: Mapping[int, Sample]) -> Figures:
    """As `interval`, of the mean of one arm."""
    return interval(name, {"": samples}, lambda of_arms: of_arms[""])
