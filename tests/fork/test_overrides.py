"""Every override: what we put into SGLang's, flashinfer's or torch's objects while they run, instead of a patch.

    python -m tests.fork.test_overrides     writes patches/OVERRIDES.md

A statement is one if it assigns to an import, to `sys.modules`, past `__setattr__`, or to an attribute of an object
that may be upstream's: any but `self`, and those named here. It says why, in a comment `# override: REASON` on its line
or above; a comment holds for the overrides that follow on the next lines.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "tlt_server"
LIST = REPOSITORY / "patches" / "OVERRIDES.md"
ROOMS = ("engine", "api", "seams", "launch", "metrics", "process")
MARK = "# override: "

OURS = {"_worker", "_draft_worker", "worker", "watchdog", "publication", "_open", "update", "_update", "_joined"} | {
    *("state", "follow", "events", "SAMPLING", "lane", "history", "vocabulary", "response")
}
"""Objects of our own classes."""
OF_A_STEP = {"req", "batch", "result", "output", "logits_output", "proposal", "forward_batch", "obj", "answer"} | {
    *("past", "extend", "front", "recv_req", "span", "writes", "new")
}
"""What upstream hands us to fill, one step or request of it, and copies of such."""
SETTERS = {"get_context().override", "set_global_graph_memory_pool", "library.define", "library.impl"}
"""Functions that change what all of a process reads."""
HEAD = """# Overrides

Made from the comments `# override:` in the code: `python -m tests.fork.test_overrides`. What SGLang, flashinfer and
torch are made to do other than by a patch: each place that assigns into their objects while they run. Copies are of one
server's objects; no class of theirs is changed.

| where | what | why |
|---|---|---|
"""


class Override(NamedTuple):
    """where: module and function. lines: first and last, from 1."""

    where: str
    what: str
    lines: tuple[int, int]


def imports_of(tree: ast.Module) -> set[str]:
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in ("sglang", "flashinfer", "torch", "sys")
    }


def holder(node: ast.expr) -> str:
    """The last name of what an attribute is assigned to."""
    if isinstance(node, ast.Call):
        return holder(node.func)
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def assigned(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement, or a call of setattr's kind, writes to."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "setattr__", "patch.object")):
        yield ast.Attribute(node.args[0], ast.unparse(node.args[1]).strip("'"))
    elif isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in SETTERS:
        yield ast.Attribute(ast.Name("a process"), called)


def is_override(target: ast.expr, imported: set[str]) -> bool:
    if isinstance(target, ast.Subscript):
        return ast.unparse(target.value) == "sys.modules"
    if not isinstance(target, ast.Attribute):
        return False
    root = ast.unparse(target).split(".")[0]
    return root in imported or holder(target.value) not in {"self"} | OURS | OF_A_STEP


def found_in(tree: ast.AST, imported: set[str], where: str) -> Iterator[Override]:
    for node in ast.iter_child_nodes(tree):
        inside = where
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{where}{'.' if where[-1] != ':' else ''}{node.name}"
        targets = [
            ast.unparse(each).removeprefix("a process.") for each in assigned(node) if is_override(each, imported)
        ]
        if targets:
            assert isinstance(node, ast.stmt | ast.expr)
            yield Override(inside, ", ".join(targets), (node.lineno, node.end_lineno or node.lineno))
        yield from found_in(node, imported, inside)


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0].split(".")[0] in ROOMS]


@cache
def overrides(path: Path) -> list[tuple[Override, str]]:
    """Those of a module in order, each with its reason; an empty one where no comment says it."""
    tree = ast.parse(path.read_text())
    lines = ["", *path.read_text().splitlines()]
    reasons: dict[int, str] = {}
    explained = []
    name = path.relative_to(PACKAGE).as_posix()
    for each in sorted(found_in(tree, imports_of(tree), f"{name}:"), key=lambda each: each.lines):
        first, last = each.lines
        own = next((line for line in lines[first - 1 : last + 1] if MARK in line), "")
        reason = own.partition(MARK)[2] or reasons.get(first - 1, "")
        reasons[last] = reason
        explained.append((each, reason))
    return explained


def as_markdown() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for path in modules():
        for each, reason in overrides(path):
            module, _, function = each.where.partition(":")
            what = rows.setdefault((f"`{module}` {function}", reason), [])
            what += [each.what] if each.what not in what else []
    return HEAD + "".join(
        f"| {where} | {', '.join(f'`{each}`' for each in what)} | {reason} |\n"
        for (where, reason), what in rows.items()
    )


def test_every_override_says_why() -> None:
    for path in modules():
        for each, reason in overrides(path):
            assert reason, f"{path.name}:{each.lines[0]} assigns {each.what}: say why in a comment `{MARK}...`"
        said = path.read_text().count(MARK)
        assert said == len({(each.where, reason) for each, reason in overrides(path)}), (
            f"{path.name}: a comment that is of no override"
        )


def test_the_list_is_that_of_the_code() -> None:
    assert LIST.read_text() == as_markdown(), "python -m tests.fork.test_overrides writes it"


@pytest.mark.parametrize(
    "line",
    [
        "import sglang.srt.layers as layers; layers.softmax = ours",
        "from torch import nn; nn.Linear.forward = ours",
        "import sys; sys.modules['sgl_kernel'] = ours",
        "setattr(backend, 'plan', ours)",
        "object.__setattr__(server_args, 'tp_size', 2)",
        "backend.indices_updater.update = ours",
        "del model.forward",
        "with mock.patch.object(scheduler, 'flush_cache'): pass",
    ],
)
def test_an_override_is_found(line: str) -> None:
    tree = ast.parse(line)
    assert len(list(found_in(tree, imports_of(tree), "m.py:"))) == 1


@pytest.mark.parametrize("line", ["self.x = 1", "req.output = 1", "table['a'] = 1"])
def test_what_is_ours_is_none(line: str) -> None:
    tree = ast.parse(line)
    assert not list(found_in(tree, imports_of(tree), "m.py:"))


if __name__ == "__main__":
    LIST.write_text(as_markdown())
