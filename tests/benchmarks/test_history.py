"""The benchmark of the index: replays give what was said, costs are of full rings, figures are defined and shown."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.commands.speed.history import SMOKE, TRAFFIC, WORDS, costs, main, values
from benchmarks.lib.history.value import Group, read_groups, replayed, situations
from tests.definitions import undefined
from tlt_server import results
from tlt_server.errors import ConfigError
from tlt_server.history.calibration import Calibration

texts = st.lists(st.integers(0, 4), min_size=1, max_size=80)


@given(st.lists(texts, max_size=3), st.lists(texts, min_size=1, max_size=3), st.integers(1, 8))
def test_every_token_is_given_once_whatever_is_known(
    known: list[list[int]], running: list[list[int]], most: int
) -> None:
    found = replayed([1, 2], known, running, most, Calibration())
    assert found.tokens == sum(len(each) - 1 for each in running)  # the first is the prefill's
    assert -(-found.tokens // (most + 1)) <= found.passes <= found.tokens


def test_a_sibling_that_said_the_same_is_worth_all_drafts() -> None:
    text = list(range(1, 82))
    assert replayed([0], [text], [text], 7, Calibration())[:2] == (80, 10)
    assert replayed([0], [], [text], 7, Calibration()) == (80, 80, 80)


def test_siblings_are_others_and_an_epoch_before_is_the_earlier_one() -> None:
    group = Group([0], [[1], [2], [3]], [[4]])
    found = situations(group, [0, 2])
    assert found["finished_2"] == [([[2], [3]], [[1]]), ([[3], [1]], [[2]]), ([[1], [2]], [[3]])]
    assert found["finished_0"] == [([], [[1]]), ([], [[2]]), ([], [[3]])]
    assert found["together_epoch"] == [([[4]], [[1], [2], [3]])]
    assert set(WORDS) < set(found)


def test_the_bars_of_memory_hold_under_ten_times_the_traffic() -> None:
    found = costs(SMOKE)
    assert found["bytes_a_token"] <= 48
    assert found["bytes_a_token_kept"] <= 48
    assert 0.95 <= found["kept_over_capacity"] <= 1
    assert found["traffic_over_capacity"] == TRAFFIC == 10


def test_a_dump_is_read_and_valued(tmp_path: Path) -> None:
    lines = [{"prompt": [1], "tokens": list(range(2, 40)), "epoch": epoch} for epoch in (0, 1, 1)]
    (tmp_path / "dump").write_text("\n".join(map(json.dumps, lines)))
    [group] = read_groups(tmp_path / "dump")
    assert (len(group.earlier), len(group.responses)) == (1, 2)
    made = values("dump", [group], SMOKE)
    assert made["tokens_a_pass_dump_finished_1_width_4"] == pytest.approx(37 / 10)
    assert not undefined(made)


@pytest.mark.parametrize(
    "text", ["", "{", '{"prompt": [1]}', '{"prompt": [1], "tokens": [2], "epoch": 1}', '{"prompt": 1, "epoch": 0}']
)
def test_what_is_no_dump_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dump").write_text(text)
    with pytest.raises(ConfigError, match=r"rollouts .*dump: no"):
        read_groups(tmp_path / "dump")


@pytest.mark.slow
def test_the_command_keeps_and_shows_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--smoke", "--json", str(tmp_path / "x.json")])
    made = results.read(tmp_path / "x.json").figures
    assert not undefined(made)
    said = capsys.readouterr().out
    assert all(words in said for words in (*WORDS.values(), "long: tokens a pass", "us to add a token"))
