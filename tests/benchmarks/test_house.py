"""The house's figures: of a small tree, of files that are given; and what `python -m benchmarks` lists."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import __main__ as entrance
from benchmarks.commands.project import house
from benchmarks.lib.project import ages, catalogue
from benchmarks.lib.project.tree import arrows_of, sizes
from tests.definitions import undefined
from tlt_server import results
from tlt_server.errors import ConfigError


def git(top: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x")
    return subprocess.run(
        ["git", "-C", str(top), *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    files = {
        "README.md": "three words here",
        "benchmarks/README.md": "a\nb\n",
        "tlt_server/errors.py": "",
        "tlt_server/wire/a.py": "from tlt_server import errors\nimport tlt_server.errors\n",
        "tlt_server/engine/weights/watchdog.py": "def f():\n    from tlt_server.wire.a import x\n    return x\n",
        "clients/c/one.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_sizes_of_a_tree(top: Path) -> None:
    assert sizes(top) == {
        "lines_tlt_server": 5,
        "lines_strategy": 0,
        "lines_wire": 2,
        "lines_watchdog": 3,
        "readme_words": 3,
        "modules_max": 1,
        "benchmarks_readme_lines": 2,
        "longest_file": 3,
        "longest_function": 3,
        "room_imports": 2,
        "imports_engine_to_wire": 1,
        "imports_wire_to_errors": 2,
    }
    assert arrows_of(top) == {("engine", "wire"): 1, ("wire", "errors"): 2}


def test_a_tree_of_before_is_looked_at_and_put_away(
    top: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(house, "TOP", top)
    (top / "tlt_server/strategy").mkdir()
    (top / "tlt_server/strategy/new.py").write_text("x = 1\n")
    given = tmp_path_factory.mktemp("given") / "given.json"
    given.write_text('{"coverage": 90.5, "simulator_plays": 2, "simulator_passed": 1}')
    kept = given.with_name("house.json")
    house.main(["--before", "HEAD", "--with", str(given), "--json", str(kept)])
    figures = results.read(kept).figures
    assert (figures["lines_strategy"], figures["lines_strategy_before"], figures["coverage"]) == (1, 0, 90.5)
    assert not undefined(figures)
    assert git(top, "worktree", "list").count("\n") == 0
    with pytest.raises(ConfigError, match=r"--before nothing: .*name one of git log's"), house.checkout("nothing"):
        pass


def test_plays_are_counted_from_rates() -> None:
    rates = {"pass_rate_a_bandit": 0.5, "pass_rate_b_bandit": 1.0, "pass_rate_b_paper": 0.0, "x_bandit": 9.0}
    assert house.plays(rates, 6) == {"simulator_passed": 9, "simulator_plays": 12}


def test_what_is_no_figures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"coverage": "much"}')
    with pytest.raises(ConfigError, match="names and numbers"):
        house.figures_in(tmp_path / "x.json")


def test_a_result_is_older_once_what_it_measures_has_changed_but_for_names(top: Path) -> None:
    before = git(top, "rev-parse", "HEAD")
    watchdog = "tlt_server/engine/weights/watchdog.py"
    (top / "tlt_server/engine/new").mkdir()
    git(top, "mv", watchdog, "tlt_server/engine/new/watchdog.py")
    wire = top / "tlt_server/wire/a.py"
    wire.write_text(wire.read_text().replace("import tlt_server.errors", "import tlt_server.other"))
    git(top, "commit", "-qam", "names")
    assert ages.changed_since(before, top) == {}
    wire.write_text(wire.read_text() + "x = 1\n")
    git(top, "commit", "-qam", "more")
    assert list(ages.changed_since(before, top) or ()) == ["tlt_server/wire/a.py"]
    assert ages.changed_since("0" * 40, top) is None
    assert ages.changed_since("unknown", top) is None


@pytest.mark.slow
def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    entrance.main([])
    said = capsys.readouterr().out
    for command in catalogue.commands().values():
        assert f"  {command.name} " in said
        assert command.summary.endswith((".", "?"))
        assert all((ages.TOP / path).exists() for path in command.measures), command.name
    with pytest.raises(SystemExit, match="2"):
        entrance.main(["no"])
    assert "no such benchmark" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.commands())
def test_every_command_says_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        entrance.main([name, "--help"])
    assert "--help" in capsys.readouterr().out


def test_folders_are_small() -> None:
    folders = {path.parent for path in (ages.TOP / "benchmarks").rglob("*.py")}
    assert all(len(list(folder.glob("*.py"))) <= 14 for folder in folders)
