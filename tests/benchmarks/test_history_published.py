"""The dump that is made of published code: its tests, in groups that are as large in both releases."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.lib.history.published import GROUP, LEAST, functions_of, lines, modules_of, wheel_of
from tlt_server.errors import ConfigError

LONG = "    assert 1\n" * LEAST


def test_tests_are_taken_as_they_are_written() -> None:
    source = (
        "import x\n\n\n@slow\ndef test_a():  # why\n    assert x.y == 1\n\n\ndef helper(): ...\n\n\ndef test_b(): ...\n"
    )
    assert functions_of(source) == ["def test_a():  # why\n    assert x.y == 1", "def test_b(): ..."]


def test_groups_are_of_modules_that_both_releases_have(tmp_path: Path) -> None:
    sizes = {"a": (GROUP, GROUP + 3), "b": (GROUP, GROUP - 1), "c": (0, GROUP), "d": (GROUP + 1, GROUP)}
    epochs = []
    for release in range(2):
        with ZipFile(tmp_path / f"sympy-{release}-py3.whl", "w") as wheel:
            for name, counts in sizes.items():
                tests = [f"def test_{n}():\n{LONG}\n" for n in range(counts[release])]
                wheel.writestr(f"sympy/core/tests/test_{name}.py", "".join([*tests, "def test_short(): ...\n"]))
            wheel.writestr("sympy/core/test_x.py", "")
        epochs.append(
            modules_of(wheel_of(tmp_path, f"sympy-{release}-*.whl"), lambda text: [*map(len, text.split("\n"))])
        )
    made = list(lines(epochs, lambda text: [len(text), ord(text.split("test_")[1][0])]))
    assert {chr(line["prompt"][1]) for line in made} == {"a", "d"}
    assert [line["epoch"] for line in made] == ([0] * GROUP + [1] * GROUP) * 2
    assert all(len(line["tokens"]) >= LEAST for line in made)


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sympy-9"):
        wheel_of(tmp_path, "sympy-9-*.whl")
