"""Kept results of adaptation as Markdown."""

from benchmarks.lib.adaptation.figures import ARMS, LAST
from benchmarks.lib.tables import origin, table
from tlt_server.results import Figures, Result

EVERY = 5
"""Steps from one column of accept lengths to the next."""


def adaptation(result: Result) -> str:
    """By arm: the end of the runs; accept lengths by step; what was gained, and what speculation changed."""
    figures = result.figures
    found = [arm for arm in ARMS if f"accept_length_{arm}_last" in figures]
    runs = (
        f"{figures['seeds']} runs an arm, {figures['rl_steps']} steps each; the task changes after step "
        f"{figures['switch_step']}. {figures['failed_requests']} of {figures['requests']:,} requests failed."
    )
    return "\n\n".join([origin(result), runs, _ends(figures, found), _by_step(figures, found), *_lines(figures)])


def _ends(figures: Figures, found: list[str]) -> str:
    names = [
        ("accept_length_{}_before", "{:.2f}", f"accept length, the {LAST} steps before the change"),
        ("accept_length_{}_last", "{:.2f}", f"accept length, the last {LAST}"),
        ("tokens_per_s_{}_last", "{:,.0f}", "rollout tokens/s"),
        ("reward_{}_before", "{:.3f}", f"reward, the {LAST} before"),
        ("reward_{}_last", "{:.3f}", f"the last {LAST}"),
        ("accuracy_{}", "{:.3f}", "held-out accuracy"),
    ]
    rows = [[arm, *(_between(figures, name.format(arm), form) for name, form, _ in names)] for arm in found]
    return table(["arm", *(words for *_, words in names)], rows)


def _between(figures: Figures, name: str, form: str) -> str:
    low, high = (form.format(figures[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{form.format(figures[name])} ({low} to {high})"


def _by_step(figures: Figures, found: list[str]) -> str:
    steps = [1, *range(EVERY, int(figures["rl_steps"]) + 1, EVERY)]
    rows = [[arm, *(f"{figures[f'accept_length_{arm}_step_{step}']:.2f}" for step in steps)] for arm in found]
    return table(["accept length at step", *map(str, steps)], rows)


def _lines(figures: Figures) -> list[str]:
    lines = []
    if "accept_length_gain" in figures:
        lines.append(
            "In the end the adapting drafter's accept length is "
            f"{_between(figures, 'accept_length_gain', '{:.2f}')} times the better of frozen and control. With "
            f"speculation less without: reward {_between(figures, 'reward_gap', '{:+.3f}')}, held-out accuracy "
            f"{_between(figures, 'accuracy_gap', '{:+.3f}')}."
        )
    if "training_steps" in figures:
        lines.append(f"The adapting drafter had {figures['training_steps']:,.0f} training steps a run.")
    if "accept_length_longer_start" in figures:
        lines.append(
            f"At the start the frozen drafter's accept length is {figures['accept_length_frozen_start']:.3f}, that of "
            f"one trained {figures['longer_steps']:,} steps longer {figures['accept_length_longer_start']:.3f}."
        )
    return lines
