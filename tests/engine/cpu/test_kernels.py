"""The stand-in for `sgl_kernel` against the calls that the installed SGLang makes."""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt_server.engine.cpu import kernels

# Imported inside a constructor of upstream's AMX attention backend, which the CPU engine does not use.
NOT_OURS = {"build_draft_decode_metadata_cpu"}


def _sources() -> list[tuple[str, ast.Module]]:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    root = Path(spec.origin).parent
    texts = {
        file: file.read_text()
        for part in ("srt/speculative", "srt/mem_cache", "kernels/ops")
        for file in (root / part).rglob("*.py")
    }
    return [(str(file.relative_to(root)), ast.parse(text)) for file, text in texts.items() if "sgl_kernel" in text]


def _imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in this module, name in sgl_kernel) of all that a module takes from sgl_kernel."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module == "sgl_kernel":
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)


@pytest.mark.slow
def test_upstream_finds_every_cpu_function_and_its_calls_fit() -> None:
    calls = set()
    for file, module in _sources():
        names = dict(_imported(module))
        wanted = {name for name in names.values() if name.endswith("_cpu")} - NOT_OURS
        assert wanted <= set(kernels.__all__), f"{file} imports {wanted - set(kernels.__all__)}"
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and names.get(node.func.id) in kernels.__all__
            ):
                function = getattr(kernels, names[node.func.id])
                inspect.signature(function).bind(*node.args, **{str(word.arg): word.value for word in node.keywords})
                calls.add(function.__name__)
    assert {name for name in kernels.__all__ if name.endswith("_cpu")} <= calls


def test_exports_are_the_functions_of_their_own_names() -> None:
    assert [name for name in kernels.__all__ if getattr(kernels, name).__name__ != name] == []
