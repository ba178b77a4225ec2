"""Writes what README.md and benchmarks/README.md show of code and of kept results:  python -m benchmarks.readme"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import tables
from benchmarks.profiling import breakdown
from tlt_server import results
from tlt_server.demo.run import as_text
from tlt_server.errors import ConfigError
from tlt_server.results import Result
from tlt_server.support import as_markdown

TOP = Path(__file__).parents[1]
READMES = (TOP / "README.md", TOP / "benchmarks/README.md")
RESULTS = TOP / "benchmarks/results"
TOGETHER = ("speedup.h200", "accept_length.h200", "context.h200", "profile.h200")  # tables that are read together
PLOTTED = {
    "speedup": ("speedup.h200", tables.speedup),
    "accept_length": ("accept_length.h200", tables.accept_length),
    "context": ("context.h200", tables.context),
    "speedup_cpu": ("speedup.cpu2", tables.speedup),
}


def blocks(folder: Path = RESULTS) -> dict[str, str]:
    """The generated parts of the READMEs, by the name in the comments around them.

    Raises:
        ConfigError: tables that are read together would be of several machines or revisions.
    """
    kept = {path.stem: results.read(path) for path in folder.glob("*.json")}
    tables.require_one_origin(kept[stem] for stem in TOGETHER if stem in kept)
    made = {
        "matrix": as_markdown(),
        "demo": _shown(kept, "demo.cpu2", lambda result: f"```\n{as_text(result.figures)}\n```"),
        "faster": _shown(kept, "speedup.h200", tables.headline),
        "profile": _shown(kept, "profile.h200", breakdown.as_markdown),
    }
    for name, (stem, table) in PLOTTED.items():
        picture = f"\n\n![{stem}](results/plots/{stem}.svg)" if stem in kept else ""
        made[name] = _shown(kept, stem, table) + picture
    return made


def _shown(kept: Mapping[str, Result], stem: str, table: Callable[[Result], str]) -> str:
    return table(kept[stem]) if stem in kept else "Not measured yet."


def filled(text: str, folder: Path = RESULTS) -> str:
    """A README with its generated parts made anew."""
    made = blocks(folder)
    pattern = rf"(<!-- ({'|'.join(made)}) -->\n).*?(?=<!-- /\2 -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{made[found[2]]}\n", text, flags=re.DOTALL)


if __name__ == "__main__":
    try:
        for readme in READMES:
            readme.write_text(filled(readme.read_text()))
    except ConfigError as error:
        sys.stderr.write(f"readme: {error}\n")
        sys.exit(error.exit_code)
