"""Which commands there are, read without importing them: torch takes seconds."""

import ast
from dataclasses import dataclass
from pathlib import Path

COMMANDS = Path(__file__).parents[2] / "commands"


@dataclass(frozen=True)
class Command:
    """A module of `commands/`: its first line says what it asks, its `MEASURES` of which paths of the tree."""

    room: str
    name: str
    summary: str
    measures: tuple[str, ...]

    @property
    def module(self) -> str:
        return f"benchmarks.commands.{self.room}.{self.name}"


def commands() -> dict[str, Command]:
    """All, by name, room by room."""
    return {path.stem: _read(path) for path in sorted(COMMANDS.glob("*/*.py"))}


def _read(path: Path) -> Command:
    tree = ast.parse(path.read_text())
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    found = [node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node) == ["MEASURES"]]
    return Command(path.parent.name, path.stem, summary, ast.literal_eval(found[0]) if found else ())


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
