"""What a bench found: a table, figures, and a recommendation."""

import re
from collections.abc import Sequence
from statistics import median

from rich.table import Table

from tlt_server.bench.measure import Measured, Visit
from tlt_server.bench.plan import BANDIT, OFF
from tlt_server.results import Figures

PAYS, LOSES = 1.03, 0.97
"""Ratios of rates that a few seconds can tell from 1."""
LITTLE = 1.3
"""Accept length at which no arm pays on a GPU, where a step that speculates takes longer than a plain one by more."""


def figures_of(found: Measured) -> Figures:
    """Of each side at each load: tokens/s and accept length, a median over rounds; the speed-up over `off` in the same
    round: median, least, most; and the share of verify passes that accepted the draft beyond each depth."""
    figures: Figures = {}
    for (side, load), visits in found.visits.items():
        name = key(side, load)
        figures[f"tokens_per_s_{name}"] = round(median(map(_rate, visits)), 1)
        if (drafts := sum(visit.drafts for visit in visits)) and side != OFF:
            depths = [sum(counts) / drafts for counts in zip(*_padded(visits), strict=True)]
            figures[f"accept_length_{name}"] = round(1 + sum(depths), 3)
            figures |= {f"accepted_{k}_{name}": round(share, 3) for k, share in enumerate(depths, 1) if share}
        if side != OFF and (over := _over(found, side, load)):
            for which, value in ("", median(over)), ("min_", min(over)), ("max_", max(over)):
                figures[f"speedup_{which}{name}"] = round(value, 3)
    return figures


def key(side: str, load: int) -> str:
    """A side at a load, in the names of figures."""
    return f"{side.replace(',', '_')}_batch_{load}"


def _rate(visit: Visit) -> float:
    return visit.tokens / visit.seconds


def _padded(visits: Sequence[Visit]) -> list[list[int]]:
    depth = max(len(visit.accepted) for visit in visits)
    return [[*visit.accepted, *[0] * (depth - len(visit.accepted))] for visit in visits]


def _over(found: Measured, side: str, load: int) -> list[float]:
    """A side's rate over that of `off`, round by round; rounds that one of them lacks are left out."""
    pairs = zip(found.visits.get((side, load), ()), found.visits.get((OFF, load), ()), strict=False)
    return [_rate(ours) / _rate(plain) for ours, plain in pairs if plain.tokens]


def table(found: Measured, figures: Figures) -> Table:
    """A row for each side and load."""
    shown = Table("requests", "strategy", "tokens/s", "speed-up, spread", "accept length", "accepted by depth")
    for side, load in sorted(found.visits, key=lambda visited: visited[1]):
        name = key(side, load)
        begin, speedup = re.compile(rf"accepted_\d+_{name}"), figures.get(f"speedup_{name}")
        depths = [share for figure, share in figures.items() if begin.fullmatch(figure)]
        shown.add_row(
            str(load),
            side,
            f"{figures[f'tokens_per_s_{name}']:,.0f}",
            f"{speedup:.2f}, {figures[f'speedup_min_{name}']:.2f}-{figures[f'speedup_max_{name}']:.2f}"
            if speedup is not None
            else "",
            f"{figures[f'accept_length_{name}']:.2f}" if f"accept_length_{name}" in figures else "",
            " ".join(f"{share:.2f}" for share in depths),
        )
    return shown


def recommendation(found: Measured, figures: Figures) -> str:
    """What to do, in a line."""
    loads = sorted({load for _, load in found.visits})
    gains = {load: figures[name] for load in loads if (name := f"speedup_{key(BANDIT, load)}") in figures}
    if not gains:
        return "Too little was measured to say anything: let it run on."
    told = ", ".join(f"{gain:.2f} at {load}" for load, gain in gains.items())
    if max(gains.values()) < PAYS:
        lengths = [value for name, value in figures.items() if name.startswith("accept_length_")]
        untrained = max(lengths, default=1.0) < LITTLE
        remedy = "train the drafter on your prompts (tlt-server train)" if untrained else "mode off is as good"
        line = f"Speculation does not pay here ({told} times plain decoding): {remedy}."
    elif min(gains.values()) < LOSES:
        line = f"The bandit pays at some loads alone ({told}): let it learn for longer, or set mode off at the others."
    else:
        line = f"Leave the bandit on: {told} times as fast as plain decoding."
    unsure = [str(load) for load in gains if len({ratio > 1 for ratio in _over(found, BANDIT, load)}) > 1]
    doubt = [f"Rounds disagree at {' and '.join(unsure)}: ask for more --seconds or --rounds."] if unsure else []
    return " ".join([line, *(said for load in gains if (said := _better(found, figures, load))), *doubt])


def _better(found: Measured, figures: Figures, load: int) -> str:
    """Of an arm that by itself is faster than the bandit; nothing where none is."""
    alone = {side.name: figures.get(f"speedup_{key(side.name, load)}", 0.0) for side in found.sides}
    bandit = alone.pop(BANDIT)
    best = max(alone, key=alone.__getitem__)
    return f"At {load}, {best} by itself is faster: {alone[best]:.2f}." if alone[best] > PAYS * bandit else ""
