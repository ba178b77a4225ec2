"""What drains of a batch say of the sides that drained it."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

from benchmarks.commands.speed.strategy import ADAPTIVE, BANDIT
from benchmarks.lib.comparison import PLAIN
from benchmarks.lib.draining import DecodeStep, Speeds, decode_seconds, decode_steps, trace
from benchmarks.lib.strategies import OFF, name_of_choice
from tlt_server.engine.decode.steplog import SettledStep
from tlt_server.results import Figures

ELASTIC, TABLE = "elastic", "table"
COLD = "bandit_cold"
BINS = 40


class Drained(NamedTuple):
    """One drain: seconds until the last answer; tokens that decode steps gave each response; its steps, of a server
    that logs them; of one that learns, what choosing took of a step in its last thousand."""

    seconds: float
    lengths: Sequence[int]
    steps: list[SettledStep]
    selecting_us: float | None = None


def drain_figures(
    found: Mapping[str, Sequence[Sequence[Drained]]], fixed: Sequence[str], known: Speeds, what: str
) -> Figures:
    """Times and speed-ups of all sides; the bandit against the others and the oracle.

    found: drains of each side, by round, in which it may have had several. fixed: sides of one arm, or off. known: from
    all their steps. what: the batch, in the figures' names.
    """
    figures = Figures()
    for side, rounds in found.items():
        figures[f"drain_s_{side}_{what}"] = median(each.seconds for each in chain(*rounds))
        over = _ratios(found, known, side, PLAIN)
        if side != PLAIN:
            figures |= {f"speedup_{side}_drain_{what}": median(over), f"speedup_min_{side}_drain_{what}": min(over)}
            figures |= {f"speedup_max_{side}_drain_{what}": max(over)}
    single = [*fixed, *(side for side in found if side.startswith("upstream_chain_"))]
    best = max(single, key=lambda side: figures[f"speedup_{side}_drain_{what}"])
    others = {"adaptive": ADAPTIVE, "best_arm": best, ELASTIC: ELASTIC, TABLE: TABLE, "paper": "paper"}
    for name, side in others.items():
        if side in found:
            figures[f"drain_ratio_to_{name}_{what}"] = median(_ratios(found, known, BANDIT, side))
    if COLD in found:
        figures[f"drain_cold_ratio_to_best_arm_{what}"] = median(_ratios(found, known, COLD, best))
    ours = list(chain(*found[BANDIT]))
    oracles = [known.replay(each.lengths, known.best) for each in ours]
    figures[f"drain_oracle_s_{what}"] = median(oracles)
    figures[f"drain_ratio_to_oracle_{what}"] = median(
        oracle / decode_seconds(each.steps) for oracle, each in zip(oracles, ours, strict=True)
    )
    figures[f"drain_lost_{what}"] = median(known.lost(decode_steps(each.steps)) for each in ours)
    figures[f"drains_{BANDIT}_{what}"] = len(ours)
    if selecting := [each.selecting_us for each in ours if each.selecting_us is not None]:
        figures[f"selecting_us_{what}"] = median(selecting)
    # how well the replay tells a drain's time: 1 is exactly
    figures[f"drain_replay_{OFF}_{what}"] = median(
        _plain_seconds(known, each) / decode_seconds(each.steps) for each in chain(*found[OFF])
    )
    return figures | trace_figures(decode_steps(ours[-1].steps), what)


def _plain_seconds(known: Speeds, drained: Drained) -> float:
    """Of plain decoding, replayed for the lengths of a drain."""
    return known.replay(drained.lengths, lambda _: None)


def _ratios(found: Mapping[str, Sequence[Sequence[Drained]]], known: Speeds, side: str, base: str) -> list[float]:
    """How much faster a side is than another, round by round, each beside plain decoding of its own lengths."""
    paces = (
        [median(_plain_seconds(known, each) / each.seconds for each in drains) for drains in found[name]]
        for name in (side, base)
    )
    return [ours / theirs for ours, theirs in zip(*paces, strict=False)]  # an arm that lags has fewer rounds


def trace_figures(steps: Sequence[DecodeStep], what: str) -> Figures:
    """One of the bandit's drains, over time."""
    figures: Figures = {}
    for number, each in enumerate(trace(steps, BINS)):
        name = f"trace_{what}_{number:02}"
        figures |= {f"{name}_end_s": each.end_s, f"{name}_running": each.running}
        figures[f"{name}_tokens_per_s"] = each.tokens_per_s
        figures |= {f"{name}_steps_{name_of_choice(arm)}": steps for arm, steps in each.steps.items()}
    return figures


def summary(figures: Figures) -> Figures:
    """The bandit's speed-ups over the plain server; to natural ends, over the best arm by itself, too."""
    told = {
        f"speedup_{BANDIT}_drain_": "drain_{}speedup_",
        f"speedup_{COLD}_drain_": "drain_{}cold_speedup_",
    }
    of_natural = {
        "drain_ratio_to_best_arm_natural_": "drain_natural_over_static_",
        "drain_cold_ratio_to_best_arm_natural_": "drain_natural_cold_over_static_",
    }
    made: Figures = {}
    for name, value in figures.items():
        for begin, claim in told.items():
            if name.startswith(begin):
                kind, _, count = name.removeprefix(begin).rpartition("_")
                made[claim.format(f"{kind}_" if kind else "") + count] = value
        for begin, claim in of_natural.items():
            if name.startswith(begin):
                made[claim + name.removeprefix(begin)] = value
    return made
