"""Work apart from the scheduler's loop: handed over one by one, and over when it is over."""

from typing import Any

import pytest

from tlt_server.engine.transfer.work import Phase, Work

SOON = 10.0
"""Seconds within which a thread has its turn, however busy the machine is."""


def started(do: Any) -> Work:
    work = Work(do)
    work.start()
    return work


def test_things_are_handed_over_in_order() -> None:
    def do(work: Work) -> str:
        for number in range(3):
            work.hand(number)
        return "done"

    work, got = started(do), []
    while work.phase(SOON) is Phase.HANDED:
        got.append(work.handed)
        work.take()
    assert (got, work.phase(SOON), work.result) == ([0, 1, 2], Phase.OVER, "done")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(2), KeyboardInterrupt()])
def test_what_fails_is_kept(error: BaseException) -> None:
    def do(_work: Work) -> None:
        raise error

    work = started(do)
    assert work.phase(SOON) is Phase.FAILED
    assert work.result is error


def test_one_that_is_given_up_ends() -> None:
    work = started(lambda work: work.hand("never taken"))
    assert work.phase(SOON) is Phase.HANDED
    work.give_up()
    work.join(SOON)
    assert not work.is_alive()
    assert work.handed is None
    assert work.phase(0) is Phase.FAILED
