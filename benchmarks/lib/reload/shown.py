"""Kept results of hot reload as Markdown tables."""

from collections.abc import Callable

from benchmarks.lib.tables import origin, table
from tlt_server.results import Figures, Result

BARS: list[tuple[str, Callable[[Figures], float], str]] = [
    ("failed_requests", lambda _: 0, "requests that failed"),
    ("mismatched_outputs", lambda _: 0, "outputs that differ from those without swaps"),
    ("step_ms_p99", lambda figures: 1.5 * figures["step_ms_median"] + 2, "a step beside a swap, p99 of all, ms"),
    ("worst_step_ms_p99", lambda figures: 1.5 * figures["step_ms_median"] + 2, "each swap's longest step, p99, ms"),
    ("lost_ms_p50", lambda _: 20, "decode time lost to a swap, median, ms"),
    ("live_s_p50", lambda _: 1, "from the first byte to in force, median, s"),
]
"""A figure, what it may be at most, and what it is."""


def swap(result: Result) -> str:
    """What swaps cost against their bars; ties; what the old drafter's cache costs; recovery; what grew."""
    figures = result.figures
    bars = [[what, _cell(figures, name), _short(bar(figures))] for name, bar, what in BARS if name in figures]
    lines = [
        f"{figures['swaps']:,} swaps under {figures['streams']} streams; an undisturbed step takes "
        f"{figures['step_ms_median']:.2f} ms. Of {figures['outputs']:,} outputs {figures['tie_rate']:.2%} part by a "
        f"tie; while the same drafter was pushed again and again {figures['tie_rate_control']:.2%}, without any swap "
        f"{figures['tie_rate_undisturbed']:.2%}.",
        table(["bar", "measured", "at most"], bars),
    ]
    if "windows_with_a_late_step" in figures:
        lines.append(_late(figures))
    lines.append(_cache(figures))
    if "recovery_s" in figures:
        lines.append(
            f"A random drafter was rolled back by itself after {figures['recovery_s']:.2f} s (median of "
            f"{figures['recoveries']}; at most {figures['recovery_s_max']:.2f} s)."
        )
    lines.append(
        f"From the first tenth of the swaps to the last one: GPU memory {figures['leaked_gpu_mb']:+.1f} MB, the "
        f"server's memory {figures['leaked_rss_mb']:+.1f} MB, /dev/shm {figures['leaked_shm_mb']:+.1f} MB, file "
        f"handles {figures['leaked_file_handles']:+.0f}."
    )
    return "\n\n".join([origin(result), *lines])


def _late(figures: Figures) -> str:
    swaps, others = (
        f"{figures[f'windows_with_a_late_step{which}']} of {figures[f'windows{which}']}"
        for which in ("", "_undisturbed")
    )
    return f"A step longer than that fell beside {swaps} swaps, and into {others} windows as long without a swap."


def _cache(figures: Figures) -> str:
    rows = []
    for name in sorted(each for each in figures if each.startswith("cache_cost_percent_")):
        where, old, _, tokens = name.removeprefix("cache_cost_percent_").split("_")
        lengths = f"accept_length_{where}_{old}_first_{tokens}"
        words = {"running": "running requests", "prefix": "cached prefixes"}[where]
        cells = [_cell(figures, each) for each in (f"{lengths}_fresh", lengths, name)]
        rows.append((where, old, int(tokens), [words, f"{old} to good", f"first {tokens} tokens", *cells]))
    header = ["the old drafter's keys and values in", "swap", "after it", "accept length over its own", "over the old"]
    return table([*header, "cost, %"], [row for *_, row in sorted(rows)])


def publications(result: Result) -> str:
    """By drafter and route: publications, what changed that should not, accept length before and after."""
    figures = result.figures
    rows = []
    for name in figures:
        if name.startswith("publications_"):
            case = name.removeprefix("publications_")
            drafter, ranks, route = case.split("_")
            wrong, before, after, took = (
                _cell(figures, f"{what}_{case}")
                for what in (
                    "unexpected_checksums",
                    "accept_length_before",
                    "accept_length_after",
                    "publication_ms_p50",
                )
            )
            of = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}[drafter]
            rows.append([of, ranks.removeprefix("tp"), route, _cell(figures, name), wrong, before, after, took])
    header = [
        "drafter",
        "ranks",
        "route",
        "publications",
        "with a wrong checksum",
        "accept length before",
        "after",
        "ms",
    ]
    failed = f"{figures['failed_requests']:,} of {figures['requests']:,} requests failed."
    return "\n\n".join([f"{origin(result)} {failed}", table(header, rows)])


def _cell(figures: Figures, name: str) -> str:
    return _short(figures[name]) if name in figures else ""


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
