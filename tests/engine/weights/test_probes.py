"""When what was turned off is tried again: ever later, at once under another target, never while it is on."""

from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.weights.probes import FIRST_S, LONGEST_S, Probes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_grows() -> None:
    clock = Clock()
    probes, waits = Probes(clock), []
    for _ in range(10):
        probes.failed()
        assert probes.at is not None
        waits.append(probes.at - clock.now)
        assert probes.due(1) is None
        clock.now = probes.at
        assert probes.due(1) == "it was off for a while"
        probes.began()
    assert waits == [min(FIRST_S * 2**i, LONGEST_S) for i in range(10)]


def test_another_target_is_tried_at_once() -> None:
    probes = Probes(Clock())
    for _ in range(5):
        probes.failed()
    assert probes.due(4) is None
    assert probes.due(5) == "the target is now version 5"
    probes.began()
    probes.failed()
    assert probes.at == FIRST_S


@given(st.lists(st.sampled_from(["failed", "began", "passed", "wait", "publish"])))
def test_it_is_due_only_after_a_failure(happened: list[str]) -> None:
    clock, target, off = Clock(), 0, False
    probes = Probes(clock)
    for what in happened:
        if what == "wait":
            clock.now += FIRST_S
        elif what == "publish":
            target += 1
        else:
            getattr(probes, what)()
            off = what == "failed"
        assert off == (probes.at is not None)
        if probes.due(target) is not None:
            assert off
        if probes.at is not None:
            assert probes.at <= clock.now + LONGEST_S
