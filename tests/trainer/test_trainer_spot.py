"""The state machine of spot training, by a clock that the tests move."""

from hypothesis import given
from hypothesis import strategies as st

from tlt_server.trainer.spot import Action, Overdue, Spot, Start, State, Yield

SETTLE, SILENCE, WITHIN = 2.0, 5.0, 3.0


def spot(*workers: str, at_least: int = 1) -> Spot:
    return Spot(workers, SETTLE, SILENCE, WITHIN, at_least)


def training() -> Spot:
    """One worker that trains, since time 2."""
    one = spot("a")
    assert one.report("a", 0, 0.0) == []
    assert one.report("a", 0, 2.0) == [Start(("a",))]
    return one


def test_a_worker_is_idle_when_its_load_has_been_gone_for_a_while() -> None:
    one = spot("a", "b", at_least=2)
    assert one.state("a") is State.BUSY
    assert one.report("a", 0, 10.0) == []
    assert one.report("a", 1, 11.0) == []
    assert one.report("a", 0, 12.0) == []
    one.tick(13.9)
    assert one.state("a") is State.BUSY
    one.tick(14.0)
    assert one.state("a") is State.IDLE
    one.report("a", 3, 14.5)
    assert one.state("a") is State.BUSY


def test_training_starts_on_all_that_are_idle_together_and_later_ones_join() -> None:
    three = spot("a", "b", "c", at_least=2)
    three.report("a", 0, 0.0)
    assert three.report("b", 0, 1.0) == []
    assert three.tick(2.5) == []
    assert three.tick(3.0) == [Start(("a", "b"))]
    three.report("c", 0, 4.0)
    assert three.tick(4.5) == []
    three.report("a", 0, 5.0)
    three.report("b", 0, 5.0)
    assert three.tick(6.0) == [Start(("c",))]


def test_nobody_joins_those_that_are_about_to_stop() -> None:
    three = spot("a", "b", "c", at_least=2)
    for name in "abc":
        three.report(name, int(name == "c"), 0.0)
    assert three.tick(2.0) == [Start(("a", "b"))]
    three.report("c", 0, 2.5)
    assert three.report("a", 1, 3.0) + three.report("b", 1, 3.0) == [Yield("a", 6.0), Yield("b", 6.0)]
    assert three.tick(5.0) == []
    assert three.state("c") is State.IDLE


def test_load_makes_a_training_worker_yield_once_and_overdue_once() -> None:
    one = training()
    assert one.report("a", 1, 3.0) == [Yield("a", 6.0)]
    assert one.report("a", 2, 4.0) == []
    assert one.tick(5.9) == []
    assert one.state("a") is State.TRAINING
    assert one.tick(6.0) == [Overdue("a")]
    assert one.tick(7.0) == []
    assert one.yielded("a", 7.5) == []
    assert one.state("a") is State.BUSY


def test_a_worker_that_has_yielded_may_drain_again() -> None:
    one = training()
    one.report("a", 1, 3.0)
    one.yielded("a", 3.5)
    one.report("a", 0, 4.0)
    assert one.tick(6.0) == [Start(("a",))]


def test_silence_is_taken_for_load() -> None:
    one = training()
    assert one.tick(7.0) == []
    assert one.tick(7.1) == [Yield("a", 10.1)]
    one.yielded("a", 8.0)
    assert one.report("a", 0, 9.0) == []  # it was silent: nobody knows since when it has been idle
    assert one.tick(11.0) == [Start(("a",))]


events = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["load", "drained", "yielded", "tick"]), st.floats(0.1, 4)),
    max_size=60,
)


@given(events, st.integers(1, 2))
def test_no_worker_trains_while_it_serves_and_every_one_yields_in_time(
    happened: list[tuple[str, str, float]], at_least: int
) -> None:
    both, now = spot("a", "b", at_least=at_least), 0.0
    loads, heard = dict.fromkeys("ab", 1), dict.fromkeys("ab", -99.0)
    asked: dict[str, float | None] = {}  # of workers that train: the deadline, once they are told to yield
    ended: set[str] = set()
    for worker, event, seconds in happened:
        now += seconds
        if event in ("load", "drained"):
            loads[worker], heard[worker] = int(event == "load"), now
            actions = both.report(worker, loads[worker], now)
        elif event == "yielded":
            asked.pop(worker, None)
            ended.discard(worker)
            actions = both.yielded(worker, now)
        else:
            actions = both.tick(now)
        _check(actions, asked, ended, loads, heard, now)
        for name, deadline in asked.items():
            assert both.state(name) is State.TRAINING
            assert deadline is not None or (not loads[name] and now - heard[name] <= SILENCE)
            assert deadline is None or now < deadline or name in ended


def _check(
    actions: list[Action],
    asked: dict[str, float | None],
    ended: set[str],
    loads: dict[str, int],
    heard: dict[str, float],
    now: float,
) -> None:
    for action in actions:
        match action:
            case Start(workers):
                assert all(not loads[name] and now - heard[name] <= SILENCE for name in workers)
                assert not set(workers) & set(asked)
                asked |= dict.fromkeys(workers)
            case Yield(name, deadline):
                assert asked[name] is None
                assert deadline == now + WITHIN
                asked[name] = deadline
            case Overdue(name):
                assert name not in ended
                assert (asked[name] or 0) <= now
                ended.add(name)
