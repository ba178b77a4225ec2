"""What the runs say: accept lengths with bootstrap intervals, over runs and the held-out problems within each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.lib.online.live import Counts, accept_length
from benchmarks.lib.training.bootstrap import Sample, alone, interval
from tlt_server.results import Figures

ARMS = ("online", "offline", "embedded")
RECOVERED = 0.95


@dataclass(frozen=True)
class Run:
    """One seed.

    judged: of each arm, a response to each held-out problem.
    rounds: accept length of the responses of each round of live traffic.
    changed: likewise, after another policy was published, and training steps since that were taken before each.
    counted: what else is a mean over the runs, by the name of its figure.
    """

    judged: Mapping[str, Sequence[Counts]]
    rounds: Sequence[float]
    changed: Sequence[tuple[float, int]]
    counted: Mapping[str, float]

    @property
    def recovery_steps(self) -> int | None:
        """Training steps until a round's accept length was RECOVERED of that before the change; None: none was."""
        enough = RECOVERED * self.rounds[-1]
        return next((steps for length, steps in self.changed if length >= enough), None)


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
    found |= {f"accept_length_online_round_{number}": fmean(each) for number, each in enumerate(rounds, 1)}
    changed = zip(*((length for length, _ in run.changed) for run in runs.values()), strict=True)
    found |= {f"accept_length_changed_round_{number}": fmean(each) for number, each in enumerate(changed, 1)}
    steps = [run.recovery_steps for run in runs.values() if run.recovery_steps is not None]
    return found | {"recovered": len(steps)} | ({"recovery_steps": max(steps)} if steps else {})


def _sample(counts: Sequence[Counts]) -> Sample:
    every = np.array(counts)

    def drawn(draw: np.random.Generator | None) -> float:
        chosen = every if draw is None else draw.choice(every, len(every))
        passes, accepted = chosen.sum(0)
        return float(1 + accepted / max(passes, 1))

    return drawn
