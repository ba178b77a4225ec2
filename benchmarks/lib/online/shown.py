"""Kept results of learning from nothing as Markdown."""

from benchmarks.lib.tables import origin, table
from tlt_server.results import Figures, Result

ARMS = {
    "online": "online, the drafter in force in the end",
    "offline": "offline, the best on the way",
    "embedded": "the embedded one, which learnt much longer",
}
COLUMNS = 8
"""Rounds that are shown, at most."""


def online(result: Result) -> str:
    """What was learnt from; accept lengths by arm; how the online drafter got there."""
    figures = result.figures
    text = (
        f"{figures['seeds']} runs. Live traffic of {figures['responses']:,.0f} responses, {figures['tokens']:,.0f} "
        f"tokens, in {figures['rounds']:,.0f} rounds; with their prompts the trainer received "
        f"{figures['tokens_received']:,.0f}. The online drafter's accept length is "
        f"{_between(figures, 'online_over_offline_accept_length', '{:.1%}')} of the offline one's."
    )
    shown = [origin(result), text, _arms(figures), _by_round(figures)]
    return "\n\n".join(shown + ([_recovery(figures)] if "recovered" in figures else []))


def _arms(figures: Figures) -> str:
    rows = []
    for arm, words in ARMS.items():
        learnt = [figures.get(f"{what}_{arm}") for what in ("steps", "learnt")]
        cells = ["" if value is None else f"{value:,.0f}" for value in learnt]
        rows.append([words, _between(figures, f"accept_length_{arm}", "{:.2f}"), *cells])
    return table(["drafter", "accept length", "training steps", "tokens learnt from, each time counted"], rows)


def _recovery(figures: Figures) -> str:
    """After another policy was published."""
    lengths = [value for name, value in figures.items() if name.startswith("accept_length_changed_round_")]
    after = f", after {figures['recovery_steps']:,.0f} training steps at most" if "recovery_steps" in figures else ""
    return (
        f"By another policy the responses of a round have accept lengths of "
        f"{', '.join(f'{length:.2f}' for length in lengths)}, round after round. {figures['recovered']} of "
        f"{figures['seeds']} runs were back at 95 % of what they had before{after}."
    )


def _between(figures: Figures, name: str, form: str) -> str:
    low, high = (form.format(figures[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{form.format(figures[name])} ({low} to {high})"


def _by_round(figures: Figures) -> str:
    last = int(figures["rounds"])
    every = -(-last // COLUMNS)
    shown = sorted({1, *range(every, last + 1, every), last})
    cells = [f"{figures[f'accept_length_online_round_{number}']:.2f}" for number in shown]
    return table(["round of live traffic", *map(str, shown)], [["accept length of its responses", *cells]])
