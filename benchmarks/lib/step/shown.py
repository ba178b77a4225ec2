"""Kept results of steps as Markdown."""

import re
from statistics import median

from benchmarks.lib import tables
from benchmarks.lib.step.plan import ARMS
from tlt_server.results import Figures, Result

COLUMNS = {
    "rollout_s": "rollout, s", "learn_s": "learn", "publish_s": "publish", "step_s": "whole step",
    "rollout_share": "rollout's share", "tokens_per_s": "rollout tokens/s", "accept_length": "accept length",
}  # fmt: skip
CLAIMS = {
    "step_speedup": "bandit over off",
    "step_speedup_static": "best static arm over off",
    "step_speedup_online": "bandit, drafter trained along, over off",
    "muted_over_frozen": "training alone: muted over frozen, in time",
    "off_ratio_to_plain": "off over a server without a drafter",
}


def table(result: Result) -> str:
    """By batch: medians of each arm's phases; the whole step's speed-ups; and what was replayed."""
    figures = result.figures
    found = sorted({match[2] for name in figures if (match := re.fullmatch(r"step_s_([a-z]+)_(\w+)_seed_\d+", name))})
    whats = [what for what in found if "replayed" not in what]
    return "\n\n".join([tables.origin(result), *(part for what in whats for part in _of(figures, what))])


def _of(figures: Figures, what: str) -> list[str]:
    rows = []
    for arm in ARMS:
        cells = [_median(figures, rf"{name}_{arm}_{what}_seed_\d+") for name in COLUMNS]
        if any(cells):
            rows.append([arm, *cells])
    claims = [
        [words, *(f"{figures[f'{name}{end}_{what}']:.2f}" for end in ("", "_min", "_max"))]
        for name, words in CLAIMS.items()
        if f"{name}_{what}" in figures
    ]
    parts = [f"**{what.replace('_', ', ')}**", tables.table(["", *COLUMNS.values()], rows)]
    if claims:
        parts.append(tables.table(["whole step", "median of seeds", "least", "most"], claims))
    replays = re.compile(rf"step_speedup_(replayed_\w+_from|accept_\d+)_{what}_seed_\d+")
    told = sorted({match[1] for name in figures if (match := replays.fullmatch(name))})
    if told:
        cells = [[each.replace("_", " "), _median(figures, rf"step_speedup_{each}_{what}_seed_\d+")] for each in told]
        parts.append(tables.table(["replayed", "bandit over off"], cells))
    return parts


def _median(figures: Figures, form: str) -> str:
    values = [value for name, value in figures.items() if re.fullmatch(form, name)]
    return f"{median(values):,.2f}" if values else ""
