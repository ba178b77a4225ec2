"""How much workspace flashinfer gets for the architectures that SGLang names: the statement itself, without a GPU."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
from sglang.srt.environ import envs

MB = 1 << 20


def statement() -> ast.If:
    """SGLang's, which sets the size for Qwen2 and others; its module cannot be imported without flashinfer."""
    source = Path(sglang.__file__).parent / "srt/layers/attention/flashinfer_backend.py"
    found = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.If) and "Qwen2ForCausalLM" in ast.unparse(node.test)
    ]
    return found[0]


@pytest.mark.parametrize(("asked", "given"), [(None, 512 * MB), (128 * MB, 512 * MB), (2048 * MB, 2048 * MB)])
def test_the_environment_may_ask_for_more(monkeypatch: pytest.MonkeyPatch, asked: int | None, given: int) -> None:
    variable = envs.SGLANG_FLASHINFER_WORKSPACE_SIZE
    monkeypatch.setenv(variable.name, str(asked))
    if asked is None:
        monkeypatch.delenv(variable.name)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]))
    runner = SimpleNamespace(model_config=config)
    exec(compile(ast.Module([statement()], []), "statement", "exec"), {"model_runner": runner, "envs": envs})
    assert variable.get() == given
