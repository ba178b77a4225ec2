"""Who may be sent a request: each transition, and the streaks that lead to quarantine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.errors import ConfigError
from tlt_server.fleet.members import AFTER, FAILURES, PROBES, Fleet, Seen, State
from tlt_server.fleet.transaction import Publication

OURS = Seen("one", publications=1, model="m")


def ready(*names: str, version: str = "one") -> Fleet:
    """A fleet in which something was published."""
    fleet = Fleet(version=version, publications=1, model="m")
    for name in names:
        fleet.join(name, f"http://{name}", 0.0)
        fleet.answered(name, OURS, 0.0)
        fleet.admit(name, OURS, 0.0)
    return fleet


def state(fleet: Fleet, name: str = "a") -> State:
    return fleet.members[name].state


def test_the_first_member_says_what_the_fleet_serves() -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.join(name, f"http://{name}", 0.0)
        fleet.answered(name, Seen("default", model="m"), 1.0)
        assert state(fleet, name) is State.STALE
        assert fleet.admit(name, Seen("default", model="m"), 2.0)
    assert (fleet.version, [each.name for each in fleet.ready()]) == ("default", ["a", "b"])


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (OURS._replace(weight_version="two"), "has weight_version 'two', the fleet 'one'"),
        (OURS._replace(publications=0), "has the weights that it started with"),
        (OURS._replace(whole=False), "its weights 'one' are incomplete"),
        (OURS._replace(model="other"), "serves other, the fleet serves m"),
    ],
)
def test_other_weights_are_not_ready(seen: Seen, why: str) -> None:
    fleet = ready("a")
    fleet.answered("a", seen, 1.0)
    assert (state(fleet), fleet.members["a"].why) == (State.STALE, why)
    assert not fleet.admit("a", seen, 2.0)
    assert fleet.members["a"].why == why
    assert fleet.admit("a", OURS, 3.0)


def test_in_the_middle_of_a_publication_a_probe_says_whether_a_member_lives() -> None:
    fleet = ready("a")
    fleet.under_way = Publication(paused=True, wrote=True)
    fleet.answered("a", OURS._replace(whole=False), 1.0)
    assert state(fleet) is State.READY
    fleet.silent("a", "dead", 2.0, dead=True)
    assert state(fleet) is State.QUARANTINED


def test_probes_lead_to_suspicion_and_quarantine() -> None:
    fleet = ready("a")
    fleet.silent("a", "slow", 1.0)
    assert state(fleet) is State.SUSPECT
    fleet.answered("a", OURS, 2.0)
    assert state(fleet) is State.READY
    for _ in range(PROBES):
        fleet.silent("a", "slow", 3.0)
    assert state(fleet) is State.QUARANTINED
    fleet.answered("a", OURS, 4.0)
    assert state(fleet) is State.STALE, "a probe alone lets nobody in"


def test_who_is_dead_is_out_at_once() -> None:
    fleet = ready("a")
    fleet.silent("a", "refused", 1.0, dead=True)
    assert state(fleet) is State.QUARANTINED


def test_a_wedged_member_that_answers_probes_is_found_out() -> None:
    fleet = ready("a")
    for _ in range(FAILURES):
        fleet.request_ended("a", 1.0, well=False)
        fleet.answered("a", OURS, 1.0)
    assert state(fleet) is State.STALE
    assert fleet.admit("a", OURS, 2.0)
    fleet.request_ended("a", 3.0, well=False)
    assert state(fleet) is State.QUARANTINED, "coming back does not clear the streak"
    fleet.answered("a", OURS, 4.0)
    fleet.admit("a", OURS, 4.0)
    fleet.request_ended("a", 5.0, well=True)
    fleet.request_ended("a", 6.0, well=False)
    assert state(fleet) is State.READY


def test_a_refusal_of_the_fleets_version_makes_stale_and_of_another_does_not() -> None:
    fleet = ready("a")
    fleet.refused("a", "zero", 1.0)
    assert state(fleet) is State.READY
    fleet.refused("a", "one", 1.0)
    assert state(fleet) is State.STALE


def test_another_process_of_the_same_name_joins_anew() -> None:
    fleet = ready("a")
    fleet.join("a", "http://a", 1.0)
    assert state(fleet) is State.READY
    fleet.join("a", "http://elsewhere", 2.0)
    assert (state(fleet), fleet.members["a"].seen) == (State.JOINING, None)


def test_what_is_retired_stays_out_until_it_joins() -> None:
    fleet = ready("a")
    fleet.retire("a", "by hand", 1.0)
    fleet.answered("a", OURS, 2.0)
    fleet.silent("a", "x", 2.0, dead=True)
    assert state(fleet) is State.RETIRED
    fleet.join("a", "http://a", 3.0)
    assert state(fleet) is State.JOINING


def test_a_publication_makes_stale_who_has_not_got_it() -> None:
    fleet = ready("a", "b")
    fleet.published("two", {"a"}, 1.0)
    assert (fleet.version, state(fleet, "a"), state(fleet, "b")) == ("two", State.READY, State.STALE)


def test_fewer_than_must_be_ready_get_nothing() -> None:
    fleet = ready("a", "b")
    fleet.min_ready = 2
    assert fleet.may_send("a")
    fleet.silent("b", "dead", 1.0, dead=True)
    assert not fleet.may_send("a")
    with pytest.raises(ConfigError, match="--min-ready 0"):
        Fleet(min_ready=0)


@given(st.lists(st.sampled_from(["join", "answer", "other", "silent", "dead", "well", "ill", "refuse", "retire"])))
def test_every_move_is_one_of_the_table(moves: list[str]) -> None:
    fleet = ready("a")
    before = state(fleet)
    for now, move in enumerate(moves):
        match move:
            case "join":
                fleet.join("a", f"http://{now}", now)
            case "answer" | "other":
                fleet.answered("a", OURS if move == "answer" else OURS._replace(weight_version="x"), now)
            case "silent" | "dead":
                fleet.silent("a", "", now, dead=move == "dead")
            case "well" | "ill":
                fleet.request_ended("a", now, well=move == "well")
            case "refuse":
                fleet.refused("a", "one", now)
            case _:
                fleet.retire("a", "", now)
        after = state(fleet)
        assert after is before or after in AFTER[before] | {each for over in AFTER[before] for each in AFTER[over]}
        assert after is not State.READY or before in (State.READY, State.SUSPECT), "nobody is let in but by admit"
        assert [event.number for event in fleet.events] == list(range(1, len(fleet.events) + 1))
        before = after
