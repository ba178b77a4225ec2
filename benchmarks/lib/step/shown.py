"""Kept results of steps as Markdown."""

import re
from collections.abc import Sequence
from statistics import median

from benchmarks.lib import tables
from benchmarks.lib.step.plan import ARMS, FROZEN, MODES, OFF, ON_POLICY
from tlt_server.results import Figures, Result

COLUMNS = {
    "rollout_s": "rollout, s", "learn_s": "learn", "offload_s": "offload", "draft_s": "drafter",
    "publish_s": "publish", "step_s": "whole step", "rollout_share": "rollout's share",
    "tokens_per_s": "rollout tokens/s", "throughput": "tokens/s of whole steps", "accept_length": "accept length",
}  # fmt: skip
CLAIMS = {
    "step_speedup": "bandit over off",
    "step_speedup_static": "best static arm over off",
    "step_speedup_online": "bandit, drafter trained along, over off",
    "online_over_frozen_after_change": "after a change of the task: drafter trained along over frozen",
    "muted_over_frozen": "training alone: muted over frozen, in time",
    "off_ratio_to_plain": "off over a server without a drafter",
}
FLIGHT = ["rollouts", "off, tokens/s of whole steps", "bandit", "bandit over off", "age of a token, off", "bandit"]


def table(result: Result) -> str:
    """By batch and mode: medians of each arm's phases; the whole step's speed-ups; and what was replayed. Of a batch
    with several modes, what they are worth with speculation and without, beside how old tokens are."""
    figures = result.figures
    found = sorted({match[2] for name in figures if (match := re.fullmatch(r"step_s_([a-z]+)_(\w+)_seed_\d+", name))})
    whats = [what for what in found if "replayed" not in what]
    parts = [tables.origin(result), *(part for what in whats for part in _of(figures, what))]
    for what in whats:
        if others := [mode for mode in MODES if f"{what}_{mode}" in whats]:
            parts.append(tables.table(FLIGHT, [_mode(figures, what, mode) for mode in (ON_POLICY, *others)]))
    return "\n\n".join(parts)


def _of(figures: Figures, what: str) -> list[str]:
    rows = {arm: [_median(figures, f"{name}_{arm}_{what}") for name in COLUMNS] for arm in ARMS}
    rows = {arm: cells for arm, cells in rows.items() if any(cells)}
    used = [i for i in range(len(COLUMNS)) if any(cells[i] for cells in rows.values())]
    names = list(COLUMNS.values())
    claims = [
        [words, *(f"{figures[f'{name}{end}_{of}']:.2f}" for end in ("", "_min", "_max"))]
        for name, words in CLAIMS.items()
        for of in _named_by(name, what)
        if f"{name}_{of}" in figures
    ]
    phases = [[arm, *(cells[i] for i in used)] for arm, cells in rows.items()]
    parts = [f"**{what.replace('_', ', ', 1)}**", tables.table(["", *(names[i] for i in used)], phases)]
    if claims:
        parts.append(tables.table(["whole step", "median of seeds", "least", "most"], claims))
    replays = re.compile(rf"step_speedup_(replayed_\w+_from|accept_\d+)_{what}_seed_\d+")
    told = sorted({match[1] for name in figures if (match := replays.fullmatch(name))})
    if told:
        cells = [[each.replace("_", " "), _median(figures, f"step_speedup_{each}_{what}")] for each in told]
        parts.append(tables.table(["replayed", "bandit over off"], cells))
    return parts


def _named_by(claim: str, what: str) -> list[str]:
    """What a claim about these steps is named by: one that tells of the change itself, by their batch."""
    if claim.endswith("_after_change"):
        return [what.removesuffix("_change")] if what.endswith("_change") else []
    return [what]


def _mode(figures: Figures, what: str, mode: str) -> Sequence[str]:
    """A row of FLIGHT."""
    end = what if mode == ON_POLICY else f"{what}_{mode}"
    off, bandit = (_values(figures, f"throughput_{arm}_{end}") for arm in (OFF, FROZEN))
    over = f"{median(bandit) / median(off):.2f}" if off and bandit else ""
    ages = [_median(figures, f"age_mean_{arm}_{end}") for arm in (OFF, FROZEN)]
    return [mode.replace("_", " "), _median(figures, f"throughput_{OFF}_{end}"),
            _median(figures, f"throughput_{FROZEN}_{end}"), over, *ages]  # fmt: skip


def _values(figures: Figures, name: str) -> list[float]:
    """Of all seeds."""
    form = re.compile(rf"{name}_seed_\d+")
    return [value for each, value in figures.items() if form.fullmatch(each)]


def _median(figures: Figures, name: str) -> str:
    values = _values(figures, name)
    return f"{median(values):,.2f}" if values else ""
