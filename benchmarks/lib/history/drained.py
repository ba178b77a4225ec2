"""What drains of groups say: how much sooner history has them done, with each of a step's time and tokens."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.lib import tables
from benchmarks.lib.comparison import PLAIN
from benchmarks.lib.draining import LEAST_STEPS, DecodeStep, Speeds
from benchmarks.lib.strategies import name_of_choice
from tlt_server.results import Figures, Result

STATES = ("none", "fresh", "stale")
"""Of the drafter."""
EPOCHS = ("first_epoch", "second_epoch")
UNREPEATED = "unrepeated"
KINDS = ("bandit", "history")
CLAIMS = {
    **{f"drain_no_drafter_{epoch}": ("no_drafter", PLAIN, (epoch,)) for epoch in EPOCHS},
    **{f"drain_{state}_over_bandit": (f"{state}_history", f"{state}_bandit", EPOCHS) for state in ("fresh", "stale")},
    **{
        f"drain_{state}_over_bandit_{epoch}": (f"{state}_history", f"{state}_bandit", (epoch,))
        for state in ("fresh", "stale")
        for epoch in EPOCHS
    },
    **{
        f"drain_{state}_bandit_{epoch}": (f"{state}_bandit", PLAIN, (epoch,))
        for state in ("fresh", "stale")
        for epoch in EPOCHS
    },
    "drain_unrepeated_over_bandit": (f"{UNREPEATED}_history", f"{UNREPEATED}_bandit", (UNREPEATED,)),
}
"""Speed-ups: a turn, what it is held against, and the batches that count together."""


class Run(NamedTuple):
    """One drain. lengths: tokens that decode steps gave each response."""

    seconds: float
    lengths: Sequence[int]
    steps: Sequence[DecodeStep]


def tokens_a_pass(run: Run) -> float:
    """Of a request, over drafts; 1 where nothing was drafted."""
    over = [step for step in run.steps if step.arm]
    return sum(step.tokens for step in over) / sum(step.batch for step in over) if over else 1.0


def figures_of(runs: Mapping[tuple[str, str], Sequence[Run]], sizes: Sequence[int]) -> Figures:
    """Of every drain; and of those that are claimed, how much sooner it was done, each beside plain decoding of its own
    lengths: one in a thousand responses may be another one, for sums are rounded otherwise where more tokens are
    verified."""
    known = Speeds(
        [step for (turn, _), each in runs.items() if turn == PLAIN for run in each for step in run.steps], sizes
    )
    figures: Figures = {}
    for (turn, batch), each in runs.items():
        name = f"{turn}_{batch}"
        figures |= {f"drain_s_{name}": median(run.seconds for run in each), f"rounds_{name}": len(each)}
        figures[f"tokens_a_pass_{name}"] = median(map(tokens_a_pass, each))
        figures[f"mean_tokens_{name}"] = float(np.mean([run.lengths for run in each]))
        figures |= {f"share_{source}_{name}": share for source, share in shares(each).items()}

    def over(turn: str, base: str, of: Sequence[str]) -> float | None:
        """Median over the rounds."""
        if not all((side, batch) in runs for side in (turn, base) for batch in of):
            return None
        paces = (
            [_pace(known, together) for together in zip(*(runs[side, b] for b in of), strict=False)]
            for side in (turn, base)
        )
        return median(ours / theirs for ours, theirs in zip(*paces, strict=False))

    for claim, of in CLAIMS.items():
        if (ratio := over(*of)) is not None:
            figures[claim] = ratio
    return figures | step_figures(runs, known)


def _pace(known: Speeds, runs: Sequence[Run]) -> float:
    """How long plain decoding would have taken, over what they took."""
    return sum(known.replay(run.lengths, lambda _: None) for run in runs) / sum(run.seconds for run in runs)


def shares(runs: Sequence[Run]) -> dict[str, float]:
    """Of the time of decode steps: with drafts of history, with the drafter's, with none."""
    seconds = Counter[str]()
    for step in chain.from_iterable(run.steps for run in runs):
        seconds["off" if step.arm is None else step.arm.source.value] += step.seconds
    whole = sum(seconds.values())
    return {name: value / whole for name, value in sorted(seconds.items())}


def step_figures(runs: Mapping[tuple[str, str], Sequence[Run]], known: Speeds) -> Figures:
    """Milliseconds of a step, by server, arm and batch size that has a graph: a median."""
    found: dict[str, list[float]] = defaultdict(list)
    for (turn, _), each in runs.items():
        kind = "no_drafter" if turn == "no_drafter" else "plain" if turn == PLAIN else "drafter"
        for step in chain.from_iterable(run.steps for run in each):
            if known.size(step.batch) == step.batch:
                found[f"step_ms_{kind}_{name_of_choice(step.arm)}_batch_{step.batch}"].append(step.seconds)
    return {name: 1000 * median(seconds) for name, seconds in sorted(found.items()) if len(seconds) >= LEAST_STEPS}


def as_table(result: Result) -> str:
    """What was claimed, and every drain."""
    found = result.figures
    claimed = [[f"`{claim}`", f"{found[claim]:.2f}"] for claim in CLAIMS if claim in found]
    names = [name.removeprefix("drain_s_") for name in found if name.startswith("drain_s_")]
    rows = [
        [
            name.replace("_", " "),
            *(f"{found[f'{what}_{name}']:{form}}" for what, form in (("drain_s", ".2f"), ("tokens_a_pass", ".2f"))),
            *(f"{100 * found.get(f'share_{source}_{name}', 0):.0f}" for source in ("history", "drafter", "off")),
        ]
        for name in names
    ]
    heads = ["drain", "seconds", "tokens a pass over drafts", "% of its time history", "drafter", "off"]
    return "\n\n".join((tables.caption(result), tables.table(["figure", ""], claimed), tables.table(heads, rows)))
