"""clients/TRAINERS.md names tests that exist, and says of every trainer whether it works."""

import ast
import re
from pathlib import Path

TOP = Path(__file__).parents[1]
PAGE = TOP / "clients/TRAINERS.md"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table by trainer."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {re.sub(r"\[(.+)\]\(.+\)", r"\1", trainer): rest for trainer, *rest in found[2:]}


def absent(text: str, top: Path = TOP) -> list[str]:
    """Tests that a text names and that are not there."""
    named = [(top / path, test) for path, test in TEST.findall(text)]
    return [f"{path}::{test}" for path, test in named if not path.is_file() or test not in functions_of(path)]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_test_named_exists() -> None:
    assert not absent(PAGE.read_text())


def test_what_works_has_a_test_and_what_does_not_a_reason() -> None:
    found = rows(PAGE.read_text())
    assert {"slime", "Miles", "AReaL", "NeMo-RL", "verl", "tlt-grpo", "lm-eval", "OpenRLHF"} <= set(found)
    for trainer, (version, works, test) in found.items():
        assert version, trainer
        assert re.match(r"(yes|partly: .+|no: .+)", works), trainer
        assert TEST.search(test) or not works.startswith(("yes", "partly")), trainer


def test_a_test_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def test_b() -> None: ...\n")
    assert not absent("`a.py::test_b`", tmp_path)
    assert absent("`a.py::test_c` `gone.py::test_b`", tmp_path) == [
        f"{tmp_path / 'a.py'}::test_c",
        f"{tmp_path / 'gone.py'}::test_b",
    ]
