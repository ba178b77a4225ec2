"""Results: one form, written whole or not at all."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.tables import RESULTS
from tests.definitions import undefined
from tlt_server import results
from tlt_server.errors import ConfigError


@pytest.mark.slow
@given(
    st.dictionaries(st.text("abc_"), st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False))
)
def test_figures_survive(tmp_path_factory: pytest.TempPathFactory, figures: dict[str, float | int]) -> None:
    path = tmp_path_factory.mktemp("results") / "deep/er/x.json"
    written = results.measured_here("x", ["command", "--flag"], figures)
    results.write(written, path)
    assert results.read(path) == written
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_what_was_measured_is_described() -> None:
    result = results.measured_here("x", [], {})
    assert "cores" in result.machine
    assert result.versions["tlt-server"]
    assert result.date.endswith("+00:00")


def test_a_copy_without_git_says_what_it_is_a_copy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = results.git_revision.__wrapped__
    assert len(revision().removesuffix("+")) == 40
    monkeypatch.setattr(results, "__file__", str(tmp_path / "tlt_server/results.py"))
    assert revision() == "unknown"
    (tmp_path / "REVISION").write_text("abc+\n")
    assert revision() == "abc+"


def test_what_a_run_leaves_in_the_checkout_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x")
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "tlt_server/results.py"))
    monkeypatch.setattr(results, "git_revision", cache(results.git_revision.__wrapped__))
    results.require_place(tmp_path / "x.json")
    (tmp_path / "logs").write_text("of a server")
    assert len(results.measured_here("x", [], {}).revision) == 40
    assert results.git_revision.__wrapped__().endswith("+")


@pytest.mark.parametrize("text", ['{"name": "x", "speed": 3}', "{", None], ids=["another form", "no JSON", "no file"])
def test_what_is_no_result_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "x.json"
    if text:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"^result {path}: "):
        results.read(path)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_kept_results_are_of_the_form_and_defined(path: Path) -> None:
    result = results.read(path)
    assert re.fullmatch(rf"{result.name}(_\w+)?\.\w+\.json", path.name), "NAME.MACHINE, or NAME_PART.MACHINE"
    assert not undefined(result.figures)
