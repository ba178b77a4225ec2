"""What is foreseen of drafts: by what came of others, for who runs, and without looking all up in every step."""

from collections.abc import Sequence

import numpy as np
import pytest

from tlt_server.history.compiled import make_index
from tlt_server.history.foresight import EVERY, Foresight
from tlt_server.history.index import PAGE, Drafts, History, Judged, Numbers, tail_of

MOST = 4
TEXT = np.arange(1000, 1400, dtype=np.int32)


class Counting:
    """An index that says how many responses were looked up."""

    def __init__(self, index: History) -> None:
        self.index, self.looked = index, list[int]()

    def look(self, responses: Numbers, most: int, deepest: int, rates: np.ndarray) -> tuple[Drafts, np.ndarray]:
        self.looked.append(len(responses))
        return self.index.look(responses, most, deepest, rates)

    def judged(self) -> Judged:
        return self.index.judged()


def running(count: int) -> tuple[Counting, Foresight]:
    """So many, who have said what an earlier one had said."""
    index = make_index(256 * PAGE)
    for number in (count, *range(count)):
        index.begin(number, 1, tail_of([5] * 16), 0)
        index.add([number], [len(TEXT) if number == count else 20], TEXT if number == count else TEXT[:20])
    foresight = Foresight(count, MOST)
    foresight.begun(range(count))
    return Counting(index), foresight


def lengths(foresight: Foresight, index: Counting, reading: Sequence[int], of: int) -> list[float] | None:
    return foresight.lengths(index, lambda: (reading, of))  # type: ignore[arg-type]


def test_who_reads_nothing_gives_a_token() -> None:
    index, foresight = running(4)
    all_four = lengths(foresight, index, range(4), 4)
    foresight.changed()
    half = lengths(foresight, index, range(2), 4)
    foresight.changed()
    none = lengths(foresight, index, [], 4)
    assert all_four is not None
    assert half == pytest.approx([1 + (each - 1) / 2 for each in all_four])
    assert none == [1.0] * MOST
    foresight.changed()
    assert lengths(foresight, index, [], 0) == [1.0] * MOST


@pytest.mark.parametrize("count", [1, 3, 16, 128])
def test_each_is_looked_up_once_in_so_many_steps(count: int) -> None:
    index, foresight = running(count)
    assert lengths(foresight, index, range(count), count) is not None
    assert index.looked == [count]
    for _ in range(3):
        index.looked.clear()
        told = []
        for _ in range(EVERY):
            assert not foresight.due
            foresight.stepped()
            told.append(lengths(foresight, index, range(count), count) is not None)
        assert sum(index.looked) == count
        assert max(index.looked) <= -(-count // EVERY)
        assert told == [False] * (EVERY - 1) + [True]


def test_what_drafts_are_looked_up_for_is_not_looked_up_twice() -> None:
    index, foresight = running(8)
    lengths(foresight, index, range(8), 8)
    index.looked.clear()
    for _ in range(EVERY):
        foresight.draft(index, np.arange(8, dtype=np.uint32), 2)  # type: ignore[arg-type]
        foresight.stepped()
        lengths(foresight, index, range(8), 8)
    assert index.looked == [8] * EVERY


def test_what_came_is_learned_from() -> None:
    index, foresight = running(8)
    before = lengths(foresight, index, range(8), 8)
    for at in range(20, 20 + 40 * EVERY, 1):
        index.index.add(range(8), [1] * 8, np.repeat(TEXT[at], 8).astype(np.int32))
        foresight.stepped()
        after = lengths(foresight, index, range(8), 8) or before
        before = after
    assert after is not None
    assert after[-1] > 1 + 0.97 * MOST
