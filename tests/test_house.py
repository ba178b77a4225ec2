"""The architecture, held by the syntax tree: who may import whom, and what seams.py may hold."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tlt_server"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Lower floors first; a module imports from its own folder and from floors below.
FLOORS = (
    {"errors", "files", "__init__"},
    {"config", "metrics", "results", "support", "preflight", "process", "keys"},
    {"wire", "drafter", "strategy"},
    {"fork", "engine", "link", "trainer"},
    {"demo"},
    {"api"},
    {"seams"},
    {"launch"},
    {"cli"},
    {"__main__"},
)
MAY_IMPORT_SGLANG = {"engine", "api", "seams", "launch", "metrics"}


def floor(part: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if part in names)


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] if node.module != "tlt_server" else [f"tlt_server.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    here = part_of(path)
    for name in imported(path):
        if name.startswith("tlt_server."):
            there = name.split(".")[1]
            there = "__init__" if there == "__version__" else there
            assert there == here or floor(there) < floor(here), f"{path.name} imports {name}"
        if name.split(".")[0] == "sglang":
            assert here in MAY_IMPORT_SGLANG, f"{path.name} imports sglang"


def test_seams_hold_no_logic() -> None:
    """Imports, names and one lazy import: no branch, no loop, no assignment but __all__."""
    tree = ast.parse((PACKAGE / "seams.py").read_text())
    forbidden = (ast.If, ast.For, ast.While, ast.Try, ast.Lambda, ast.BinOp, ast.BoolOp, ast.Compare, ast.With)
    assert not [node for node in ast.walk(tree) if isinstance(node, forbidden)]
    assigned = [
        ast.unparse(target) for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
    ]
    assert assigned == ["__all__"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_of_sglang_is_assigned(path: Path) -> None:
    tree = ast.parse(path.read_text())
    modules = {
        a.asname or a.name.split(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, ast.Import)
        for a in n.names
        if a.name.startswith("sglang")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            modules |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            assert root is target or not (isinstance(root, ast.Name) and root.id in modules), ast.unparse(node)


def test_environment_and_argv_are_read_at_the_door() -> None:
    """argv by cli.py (and the programs that one runs as a module), the environment where a process starts."""
    for path in MODULES:
        text = path.read_text()
        name = str(path.relative_to(PACKAGE))
        if "sys.argv" in text:
            assert name in {"cli.py", "fork/refresh.py", "demo/training/train.py"}, name
        if "os.environ" in text and not name.startswith("fork/"):  # it passes its own on to git
            assert name in {"config.py", "keys.py", "launch.py", "process.py", "engine/cpu/install.py"}, name
