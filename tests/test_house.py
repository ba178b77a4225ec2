"""The architecture, held by the syntax tree: who may import whom, what seams.py may hold, how large things may be.

python -m tests.test_house    draws the imports between the rooms of tlt_server
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "tlt_server"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*MODULES, *(path for root in ("clients", "examples") for path in sorted((REPOSITORY / root).rglob("*.py")))]
# Lower floors first; a module imports from its own folder and from floors below.
FLOORS = (
    {"errors", "files", "__init__"},
    {"config", "metrics", "results", "support", "preflight", "process", "keys"},
    {"wire", "drafter", "strategy", "watch", "history"},
    {"fork", "engine", "link", "trainer"},
    {"demo", "fleet"},
    {"bench"},
    {"api"},
    {"seams"},
    {"launch"},
    {"cli"},
    {"__main__"},
)
MAY_IMPORT_SGLANG = {"engine", "api", "seams", "launch", "metrics"}


def floor(part: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if part in names)


@cache
def nodes(path: Path) -> Sequence[ast.AST]:
    """Of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> Sequence[str]:
    names = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] if node.module != "tlt_server" else [f"tlt_server.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def arrows() -> Counter[tuple[str, str]]:
    """How many imports lead from one room into another."""
    return Counter(
        (part_of(path), "__init__" if there == "__version__" else there)
        for path in MODULES
        for name in imported(path)
        if name.startswith("tlt_server.") and (there := name.split(".")[1]) != part_of(path)
    )


def drawn(found: Counter[tuple[str, str]]) -> str:
    """A line a room, the highest floor first: what it imports from, with counts; `!` where that is not below."""
    rooms = sorted({room for arrow in found for room in arrow}, key=lambda room: (-floor(room), room))
    lines = []
    for room in rooms:
        into = [(there, count) for (here, there), count in found.items() if here == room]
        told = [f"{'' if floor(there) < floor(room) else '!'}{there} {count}" for there, count in sorted(into)]
        lines.append(f"{floor(room)} {room:<10} -> {', '.join(told) or 'nothing'}")
    return "\n".join(lines)


def test_imports_go_down() -> None:
    found = arrows()
    assert all(floor(there) < floor(here) for here, there in found), f"imports between rooms:\n{drawn(found)}"


def test_what_lies_outside_is_imported_where_it_may_be() -> None:
    for path in MODULES:
        roots = {name.split(".")[0] for name in imported(path)}
        assert part_of(path) in MAY_IMPORT_SGLANG or "sglang" not in roots, f"{path} imports sglang"
        assert not roots & {"benchmarks", "tests"}, f"{path} imports what is not installed with it"


def test_seams_hold_no_logic() -> None:
    """Imports, names and one lazy import: no branch, no loop, no assignment but __all__."""
    seams = nodes(PACKAGE / "seams.py")
    forbidden = (ast.If, ast.For, ast.While, ast.Try, ast.Lambda, ast.BinOp, ast.BoolOp, ast.Compare, ast.With)
    assert not [node for node in seams if isinstance(node, forbidden)]
    assigned = [ast.unparse(target) for node in seams if isinstance(node, ast.Assign) for target in node.targets]
    assert assigned == ["__all__"]


def sglang_names(path: Path) -> set[str]:
    """That are SGLang's modules, or come from them."""
    return {
        alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0])
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith("sglang")
    }


def targets_of(node: ast.AST) -> Sequence[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign) else []


def test_nothing_of_sglang_is_assigned() -> None:
    for path in MODULES:
        names = sglang_names(path)
        for target in (target for node in nodes(path) for target in targets_of(node)):
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            upstream = root is not target and isinstance(root, ast.Name) and root.id in names
            assert not upstream, f"{path}: {ast.unparse(target)}"


def test_environment_and_argv_are_read_at_the_door() -> None:
    """argv by cli.py (and the programs that one runs as a module), the environment where a process starts."""
    for path in MODULES:
        text = path.read_text()
        name = str(path.relative_to(PACKAGE))
        if "sys.argv" in text:
            assert name in {"cli.py", "fork/refresh.py", "demo/training/train.py"}, name
        if "os.environ" in text and not name.startswith("fork/"):  # it passes its own on to git
            sets = {"fleet/start/replicas.py"}  # what Ray reads nowhere else
            doors = {"config/__init__.py", "keys.py", "launch.py", "process.py", "engine/cpu/install.py"}
            assert name in doors | sets, name


MODULES_OF_A_FOLDER, LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 14, 300, 40
LARGER = {
    "clients/tlt_client/tlt_client/client.py": "a method for each route, each with its docstring",
    "clients/tlt_client/tests/sglang_stand_in.py": "one handler for all routes",
    "tlt_server/engine/cpu/tree.py:build_tree_kernel_efficient_cpu": "one kernel, with upstream's arguments",
    "tlt_server/engine/cpu/verification.py:tree_speculative_sampling_target_only": "likewise",
}
"""What is larger than that, and why it may be."""


def sizes() -> Iterator[tuple[str, int, int]]:
    """Of every folder, file and function: its name, its size, the bound."""
    for folder, modules in Counter(path.parent for path in SOURCES).items():
        yield str(folder.relative_to(REPOSITORY)), modules, MODULES_OF_A_FOLDER
    for path in SOURCES:
        name = str(path.relative_to(REPOSITORY))
        yield name, path.read_text().count("\n"), LINES_OF_A_FILE
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{name}:{node.name}", lines, LINES_OF_A_FUNCTION


def test_folders_files_and_functions_are_small() -> None:
    assert not [
        f"{name} has {size}, of {bound}" for name, size, bound in sizes() if size > bound and name not in LARGER
    ]


if __name__ == "__main__":
    sys.stdout.write(f"{drawn(arrows())}\n")
