"""Writes the generated parts of README.md, benchmarks/README.md and docs/: of kept results, and of code."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.commands.learning import long as bench_long
from benchmarks.commands.learning import losses as bench_losses
from benchmarks.commands.learning import recipes, sharing
from benchmarks.commands.reload import scale
from benchmarks.commands.speed import capture, graphs, history, siblings, switching
from benchmarks.commands.speed import drain as bench_drain
from benchmarks.commands.speed import shapes as bench_shapes
from benchmarks.commands.speed import strategy as bench_strategy
from benchmarks.lib import tables
from benchmarks.lib.adaptation import shown as adaptation
from benchmarks.lib.online import shown as online
from benchmarks.lib.profiling import breakdown
from benchmarks.lib.project.answers import answers
from benchmarks.lib.reload import shown
from benchmarks.lib.step import shown as step
from benchmarks.lib.tables import RESULTS
from benchmarks.lib.training import shown as training
from tlt_server import results
from tlt_server.demo.parts import as_text
from tlt_server.errors import ConfigError
from tlt_server.support import as_markdown

TOP = Path(__file__).parents[3]
PAGES = (TOP / "README.md", TOP / "benchmarks/README.md", *sorted((TOP / "docs").rglob("*.md")))
RESULT_PAGES = TOP / "docs/results"
TABLES: Mapping[str, tuple[Callable[..., str], Sequence[str]]] = {
    "demo": (lambda demo: f"```\n{as_text(demo.figures)}\n```", ["demo.cpu2"]),
    "faster": (tables.headline, ["strategy.h200"]),
    "accept_length": (tables.accept_length, ["accept_length.h200"]),
    "accept_length_eagle3": (tables.accept_length, ["accept_length_eagle3.h200"]),
    "accept_length_simulated": (tables.accept_length, ["accept_length_simulated.h200"]),
    "accept_length_cpu": (tables.accept_length, ["accept_length.cpu2"]),
    "shapes_dense": (bench_shapes.table, ["shapes_dense.h200"]),
    "shapes": (bench_shapes.table, ["shapes.h200"]),
    "context": (tables.context, ["context.h200"]),
    "profile": (breakdown.as_markdown, ["profile.h200"]),
    "speedup_cpu": (tables.speedup, ["speedup.cpu2"]),
    "swap": (shown.swap, ["swap.h200"]),
    "swap_ranks": (shown.swap, ["swap.h200x2"]),
    "swap_cpu": (shown.swap, ["swap.cpu2"]),
    "publications": (shown.publications, ["publications.h200x2"]),
    "publications_cpu": (shown.publications, ["publications.cpu2"]),
    "capture": (capture.as_table, ["capture.h200"]),
    "capture_eagle3": (capture.as_table, ["capture_eagle3.h200"]),
    "adaptation": (adaptation.adaptation, ["adaptation.h200"]),
    "online": (online.online, ["online.h200"]),
    "online_cpu": (online.online, ["online.cpu2"]),
    "losses": (bench_losses.shown, ["losses.cpu2"]),
    "recipes": (recipes.shown, ["recipes.cpu2"]),
    "long": (bench_long.shown, ["long.cpu2"]),
    "strategy": (bench_strategy.table, ["strategy.h200"]),
    "strategy_256": (bench_strategy.table, ["strategy_256.h200"]),
    "strategy_fixed": (bench_strategy.table, ["strategy_fixed.h200"]),
    "drain": (bench_drain.table, ["drain.h200"]),
    "drain_recorded": (bench_drain.table, ["drain_recorded.h200"]),
    "drain_cpu": (bench_drain.table, ["drain.cpu2"]),
    "history_cpu": (history.shown, ["history.cpu2"]),
    "history_drain": (history.as_table, ["history.h200"]),
    "siblings_cpu": (siblings.as_table, ["siblings.cpu2"]),
    "scale": (scale.as_table, ["scale.cpu2"]),
    "graphs": (graphs.table, ["graphs.h200"]),
    "switching": (switching.table, ["switching.h200"]),
    "switching_ranks": (switching.table, ["switching.h200x2"]),
    "step": (step.table, ["step.h200"]),
    "step_8x8": (step.table, ["step_8x8.h200"]),
    "step_apart": (step.table, ["step_apart.h200x2"]),
    "step_change": (step.table, ["step_change.h200"]),
    "step_long": (step.table, ["step_long.h200"]),
    "step_long_sides": (step.table, ["step_long_sides.h200"]),
    "step_modes": (step.table, ["step_modes.h200"]),
    "step_muted": (step.table, ["step_muted.h200"]),
    "sharing": (sharing.table, ["sharing.h200"]),
    "sharing_hass": (sharing.table, ["sharing_hass.h200"]),
    "trainer": (training.trainer, ["trainer.h200"]),
    "trainer_1500m": (training.shapes, ["trainer_1500m.h200"]),
    "trainer_32b": (training.shapes, ["trainer_32b.h200"]),
}
"""Each block's table, and the results that it is made of."""
PLOTTED = ("context", "speedup_cpu", "drain", "drain_cpu")


NAMES = ("matrix", "answers", *TABLES)
"""Of all generated parts."""


def block(name: str, folder: Path = RESULTS, beside: Path = RESULT_PAGES) -> str:
    """A generated part of pages that lie in `beside`, by the name in the comments around it.

    Raises:
        ConfigError: its table would be of several machines or revisions.
    """
    if name == "matrix":
        return as_markdown()
    if name == "answers":
        return answers({path.stem: results.read(path) for path in folder.glob("*.json")})
    table, stems = TABLES[name]
    kept = [folder / f"{stem}.json" for stem in stems]
    if not all(path.exists() for path in kept):
        return "Not measured yet."
    sources = [results.read(path) for path in kept]
    tables.require_one_origin(sources)
    plots = os.path.relpath(RESULTS / "plots", beside)
    return table(*sources) + (f"\n\n![{stems[0]}]({plots}/{stems[0]}.svg)" if name in PLOTTED else "")


def filled(text: str, folder: Path = RESULTS, beside: Path = RESULT_PAGES) -> str:
    """A page that lies in `beside` with its generated parts made anew."""
    pattern = rf"(<!-- ({'|'.join(NAMES)}) -->\n).*?(?=<!-- /\2 -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{block(found[2], folder, beside)}\n", text, flags=re.DOTALL)


def main(argv: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m benchmarks docs", description=__doc__).parse_args(argv)
    try:
        for page in PAGES:
            page.write_text(filled(page.read_text(), beside=page.parent))
    except ConfigError as error:
        sys.stderr.write(f"docs: {error}\n")
        sys.exit(error.exit_code)
