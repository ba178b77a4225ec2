"""Kept results of training a drafter as Markdown."""

from benchmarks.lib.tables import origin, table
from tlt_server.results import Figures, Result

WAYS = {
    "packed": "packed",
    "padded": "padded, in the order of arrival",
    "masked": "the same, the loss skips padding",
    "sorted": "padded, sorted by length",
}


def trainer(result: Result) -> str:
    """Against the bars and the paper; then rates, by the way of batching; then yields."""
    figures = result.figures
    mean = figures["entries"] / figures["rollouts"]
    text = (
        f"A drafter of {figures['parameters_m']:,.1f} million parameters learns from {figures['rollouts']:,} rollouts "
        f"of {mean:.0f} entries on average and {figures['entries_max']:,} at most, in batches of "
        f"{figures['budget']:,}. Packed, {figures['tokens_per_s']:,.0f} tokens/s: {figures['training_tflops']:.3g} "
        f"TFLOP/s that training needs, {figures['mfu']:.1%} of {figures['peak_tflops']:.3g}. A step takes "
        f"{figures['step_ms']:.1f} ms, and making a pack for it {figures['pack_ms']:.1f} ms."
    )
    yields = (
        f"A worker that trains is free {figures['yield_s_p50']:.2f} s after load arrives (median of "
        f"{figures['yields']}; at most {figures['yield_s_max']:.2f} s)."
    )
    return "\n\n".join((origin(result), text, _bars(figures), _ways(figures), yields))


def shapes(*kept: Result) -> str:
    """A row for each: rates, and what a checkpoint and a yield take."""
    heads = ["drafter, million parameters", "packed, tokens/s", "TFLOP/s", "a step, ms", "packed over padded"]
    heads += ["a checkpoint stops training, ms", "a plain one", "a worker is free after, s"]
    rows = []
    for figures in (each.figures for each in kept):
        rates = [f"{figures['parameters_m']:.0f}", f"{figures['tokens_per_s']:,.0f}"]
        rates += [f"{figures['training_tflops']:.0f}", f"{figures['step_ms']:.1f}", f"{figures['packing_speedup']:.2f}"]
        rows.append([*rates, f"{figures['checkpoint_blocking_ms']:.0f}", f"{figures['checkpoint_plain_ms']:,.0f}",
                     f"{figures['yield_s_p50']:.2f}"])  # fmt: skip
    return table(heads, rows)


def _bars(figures: Figures) -> str:
    saved, plain, safe = (figures[f"checkpoint_{name}_ms"] for name in ("blocking", "plain", "safe"))
    padded, packed = (figures[f"samples_per_s_{way}"] for way in ("padded", "packed"))
    rows = [
        ["rollouts/s, padded and packed", f"{padded:.1f}", f"{packed:.1f}", packed / padded, "2.2", "13.3, 29.6: 2.2"],
        [
            "ms that a checkpoint stops training, plain",
            f"{plain:.1f}",
            f"{saved:.1f}",
            plain / saved,
            "9",
            "893, 97: 9.2",
        ],
        ["the same, on the disk when it goes on", f"{safe:.1f}", f"{saved:.1f}", safe / saved, "", ""],
    ]
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    return table(["figure", "the usual way", "here", "times better", "bar", "paper, H100"], cells)


def _ways(figures: Figures) -> str:
    rows = []
    for way, words in WAYS.items():
        rate = figures[f"samples_per_s_{way}"]
        faster = figures["samples_per_s_packed"] / rate
        rows.append(
            [words, f"{figures[f'batches_{way}']:,}", f"{figures[f'filled_{way}']:.0%}", f"{rate:.1f}", f"{faster:.2f}"]
        )
    return table(["batches", "of them", "entries of tokens", "rollouts/s", "packed is faster by"], rows)
