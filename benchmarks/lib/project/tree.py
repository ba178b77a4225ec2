"""How large a checkout is: lines, words, modules of a folder, functions, imports between rooms."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tlt_server.results import Figures

PACKAGES = ("tlt_server", "clients")
LINES = {
    "lines_tlt_server": ["tlt_server/**/*.py"],
    "lines_strategy": ["tlt_server/strategy/**/*.py"],
    "lines_wire": ["tlt_server/wire/**/*.py", "tlt_server/link/**/*.py"],
    "lines_watchdog": [f"tlt_server/engine/**/{name}.py" for name in ("watchdog", "watchdogs", "bets", "probes")],
}
WORDS = {"readme_words": "README.md", "architecture_words": "docs/architecture.md"}


def sizes(top: Path) -> Figures:
    """The figures of a checkout; none of what it does not have."""
    figures: Figures = {
        name: sum(_lines(path) for pattern in patterns for path in top.glob(pattern))
        for name, patterns in LINES.items()
    }
    figures |= {name: len((top / path).read_text().split()) for name, path in WORDS.items() if (top / path).exists()}
    modules = [path for package in PACKAGES for path in (top / package).rglob("*.py")]
    figures["modules_max"] = max(Counter(path.parent for path in modules).values())
    figures["benchmarks_readme_lines"] = _lines(top / "benchmarks/README.md")
    own = list((top / "tlt_server").rglob("*.py"))
    figures["longest_file"] = max(_lines(path) for path in own)
    figures["longest_function"] = max(length for path in own for length in _functions(path))
    arrows = arrows_of(top)
    return figures | {"room_imports": len(arrows)} | {f"imports_{a}_to_{b}": n for (a, b), n in arrows.items()}


def arrows_of(top: Path) -> dict[tuple[str, str], int]:
    """How many imports lead from one room to another: from what lies directly in tlt_server, folder or module."""
    package = top / "tlt_server"
    rooms = {path.stem for path in package.iterdir()}
    found: Counter[tuple[str, str]] = Counter()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        into = (name.split(".")[1] for name in _imports(path) if name.startswith("tlt_server."))
        found.update((room, there) for there in into if there in rooms and there != room)
    return {arrow: found[arrow] for arrow in sorted(found)}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _functions(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _lines(path: Path) -> int:
    return path.read_text().count("\n")
