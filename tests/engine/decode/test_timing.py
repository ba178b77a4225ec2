"""Arms are timed by their graphs; what arms share is replayed once."""

import time
from types import SimpleNamespace as Made
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.config import Arm
from tlt_server.engine.decode.arms import Parts
from tlt_server.engine.decode.timing import REPLAYS, rising, timings
from tlt_server.engine.graphs.capture import Pass

CHAIN, TREE = Arm(3, 1, 4), Arm(3, 4, 8)


class Graph:
    def __init__(self, milliseconds: float) -> None:
        self._seconds, self.replays = milliseconds / 1000, 0

    def replay(self) -> None:
        self.replays += 1
        time.sleep(self._seconds)


def graphs(ms: float, *sizes: int) -> Any:
    made = Made(backend=Made(_graphs={}))
    for size in sizes:
        made.backend._graphs[Key(size)] = Graph(ms)
    return made


class Key:
    def __init__(self, size: int) -> None:
        self.size = size


def parts(drafting: Any, verification: Any, extend: Any) -> Parts:
    return Parts(*(Pass("attention", each) for each in (drafting, verification, extend)), None)


def test_a_step_is_the_sum_of_its_passes() -> None:
    extend = graphs(2, 1, 4, 16)
    by_arm = {
        CHAIN: parts(graphs(3, 1, 4), graphs(5, 1, 4), extend),
        TREE: parts(graphs(6, 1), graphs(8, 1), extend),
    }
    found = timings(by_arm, graphs(4, 1, 4, 16))
    assert [(each.arm, each.batch) for each in found] == [
        *((None, size) for size in (1, 4, 16)),
        *((CHAIN, size) for size in (1, 4)),
        (TREE, 1),
    ]
    expected = [4, 4, 4, 10, 10, 16]
    for each, ms in zip(found, expected, strict=True):
        assert each.seconds == pytest.approx(ms / 1000, rel=0.6)
        assert each.seconds >= ms / 1000
    assert {graph.replays for graph in extend.backend._graphs.values()} == {1 + REPLAYS}


@pytest.mark.parametrize("plain", [None, graphs(1, 1)])
def test_nothing_is_said_unless_all_were_timed(plain: Any) -> None:
    assert timings({CHAIN: parts(None, None, None)}, plain) == []
    assert timings({CHAIN: parts(None, graphs(1, 1), None)}, None) == []


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1))
def test_a_pass_of_more_tokens_never_takes_less(seconds: dict[int, float]) -> None:
    """Whatever else the machine did while it was timed; what rises as it is stays as it is."""
    found = [each.seconds for each in rising(seconds)]
    assert found == sorted(found)
    assert all(each.seconds <= seconds[each.batch] for each in rising(seconds))
    straight = dict(zip(sorted(seconds), found, strict=True))
    assert [each.seconds for each in rising(straight)] == found
