"""Results: one form, written whole or not at all."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server import results

RESULTS = Path(__file__).parents[1] / "benchmarks/results"


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


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": "x", "speed": 3}')
    with pytest.raises(msgspec.ValidationError):
        results.read(tmp_path / "x.json")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_kept_results_are_of_the_form_and_defined(path: Path) -> None:
    result = results.read(path)
    assert path.name == f"{result.name}.{path.name.split('.')[1]}.json"
    definitions = (RESULTS.parent / "README.md").read_text()
    for name in result.figures:
        stem = name.rsplit("_", 1)[-1]
        assert f"`{name}`" in definitions or f"`_{stem}`" in definitions, name
