"""What the logs of all runs say: figures with bootstrap intervals, over runs and the steps within each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tlt_grpo.log import HeldOut, Line, Step

from benchmarks.lib.training.bootstrap import Sample, alone, interval
from tlt_server.results import Figures

ARMS = ("off", "frozen", "adapting", "control")
LAST = 10
"""Steps that a figure of the end is of, and one of the time before the task changes."""
LAST_STEPS, ALL_STEPS = slice(-LAST, None), slice(None)


@dataclass(frozen=True)
class Run:
    """What one run logged: its steps in order, and the held-out accuracy of its last policy."""

    steps: Sequence[Step]
    held_out: HeldOut

    @classmethod
    def of(cls, lines: Sequence[Line]) -> "Run | None":
        """None where the run is not over: the held-out problems come last."""
        if not lines or not isinstance(lines[-1], HeldOut) or lines[-1].step == 0:
            return None
        return cls([line for line in lines if isinstance(line, Step)], lines[-1])

    def values(self, name: str, window: slice = slice(None)) -> np.ndarray:
        """Of each step; an accept length of None is one of 1: it was decoded plainly."""
        found = (getattr(step, name) for step in self.steps[window])
        return np.array([1.0 if value is None else float(value) for value in found])


Runs = Mapping[int, Run]
"""By seed."""


def figures(runs: Mapping[str, Runs], switch: int) -> Figures:
    """All figures that the runs give; docs/results say what each is.

    Args:
        runs: by arm.
        switch: steps before the task changes.
    """
    every = [run for of_arm in runs.values() for run in of_arm.values()]
    steps = min(len(run.steps) for run in every)
    found: Figures = {
        "rl_steps": steps,
        "switch_step": switch,
        "seeds": min(len(of_arm) for of_arm in runs.values()),
        "requests": sum(step.responses + step.failed_requests for run in every for step in run.steps),
        "failed_requests": sum(step.failed_requests for run in every for step in run.steps),
    }
    for arm, of_arm in runs.items():
        found |= _of_arm(arm, of_arm, switch, steps)
    if set(runs) == set(ARMS) and _shared(runs):
        found |= _compared(runs)
    return found


def _of_arm(arm: str, runs: Runs, switch: int, steps: int) -> Figures:
    windows = {"before": slice(max(0, switch - LAST), switch), "last": LAST_STEPS}
    found: Figures = {}
    for name in ("accept_length", "tokens_per_s", "reward"):
        for when, window in windows.items():
            found |= alone(f"{name}_{arm}_{when}", {seed: _mean(run, name, window) for seed, run in runs.items()})
        every = np.array([run.values(name)[:steps] for run in runs.values()])
        found |= {f"{name}_{arm}_step_{step}": float(value) for step, value in enumerate(every.mean(0), 1)}
    for name in ("rollout_s", "learn_s", "publish_s"):
        found[f"{name}_{arm}"] = float(np.median(np.concatenate([run.values(name) for run in runs.values()])))
    found |= alone(f"accuracy_{arm}", {seed: _accuracy(run) for seed, run in runs.items()})
    found[f"drafters_{arm}"] = float(np.mean([_drafters(run) for run in runs.values()]))
    return found


def _drafters(run: Run) -> int:
    """How many drafters were in force while it sampled."""
    return len({version for step in run.steps for version in step.drafter_versions})


def _compared(runs: Mapping[str, Runs]) -> Figures:
    """How much longer the adapting drafter's accept length is in the end than the better one's of those that rest; how
    reward over all steps, and accuracy in the end, of the three that speculate differ from the one that does not."""

    def of(sample: Callable[[Run], Sample], *arms: str) -> dict[str, dict[int, Sample]]:
        return {arm: {seed: sample(runs[arm][seed]) for seed in _shared(runs)} for arm in arms}

    lengths = of(lambda run: _mean(run, "accept_length", LAST_STEPS), "frozen", "control", "adapting")
    rewards, accuracies = of(lambda run: _mean(run, "reward", ALL_STEPS), *ARMS), of(_accuracy, *ARMS)
    return (
        interval("accept_length_gain", lengths, lambda each: each["adapting"] / max(each["frozen"], each["control"]))
        | interval("reward_gap", rewards, _less_off)
        | interval("accuracy_gap", accuracies, _less_off)
    )


def _shared(runs: Mapping[str, Runs]) -> list[int]:
    """Seeds that every arm has."""
    return sorted(set.intersection(*(set(of_arm) for of_arm in runs.values())))


def _less_off(of_arms: Mapping[str, float]) -> float:
    return float(np.mean([value for arm, value in of_arms.items() if arm != "off"])) - of_arms["off"]


def _mean(run: Run, name: str, window: slice) -> Sample:
    """Over the window's steps."""
    values = run.values(name, window)
    return lambda draw: float((values if draw is None else draw.choice(values, len(values))).mean())


def _accuracy(run: Run) -> Sample:
    count, share = run.held_out.problems, run.held_out.accuracy
    return lambda draw: share if draw is None else draw.binomial(count, share) / count
