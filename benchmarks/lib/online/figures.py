"""What the runs say: accept lengths with bootstrap intervals, over runs and the held-out problems within each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.lib.online.live import Counts, accept_length
from benchmarks.lib.training.bootstrap import Sample, alone, interval
from tlt_server.results import Figures

ARMS = ("online", "offline", "embedded")


@dataclass(frozen=True)
class Run:
    """One seed.

    judged: of each arm, a response to each held-out problem.
    rounds: accept length of the responses of each round of live traffic.
    counted: what else is a mean over the runs, by the name of its figure.
    """

    judged: Mapping[str, Sequence[Counts]]
    rounds: Sequence[float]
    counted: Mapping[str, float]


def figures(runs: Mapping[int, Run]) -> Figures:
    """Of all runs, by seed; docs/results say what each is."""
    found: Figures = {"seeds": len(runs)}
    found |= {name: fmean(run.counted[name] for run in runs.values()) for name in next(iter(runs.values())).counted}
    samples = {arm: {seed: _sample(run.judged[arm]) for seed, run in runs.items()} for arm in ARMS}
    for arm in ARMS:
        found |= alone(f"accept_length_{arm}", samples[arm])
    found |= interval("online_over_offline_accept_length", samples, lambda each: each["online"] / each["offline"])
    for seed, run in runs.items():
        online, offline = (accept_length(run.judged[arm]) for arm in ("online", "offline"))
        found[f"online_over_offline_accept_length_seed_{seed}"] = online / offline
    rounds = zip(*(run.rounds for run in runs.values()), strict=True)
    return found | {f"accept_length_online_round_{number}": fmean(each) for number, each in enumerate(rounds, 1)}


def _sample(counts: Sequence[Counts]) -> Sample:
    every = np.array(counts)

    def drawn(draw: np.random.Generator | None) -> float:
        chosen = every if draw is None else draw.choice(every, len(every))
        passes, accepted = chosen.sum(0)
        return float(1 + accepted / max(passes, 1))

    return drawn
