"""Members that are killed, stopped, that refuse or fail at each phase of a transaction; fronts that are killed."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fleet.conftest import Fleet, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("do", ["kill", "stop", "fail"])
@pytest.mark.parametrize("at", ["prepare", "apply", "applied", "verify"])
def test_who_fails_is_out_and_the_others_commit(fleet: Fleet, at: str, do: str) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    if at == "verify":  # a probe asks the same
        fleet.run(fleet.front._upkeep.close())
    fleet.fault("a", at, do)
    answer = fleet.publish(1, "one")
    assert answer.status_code == 200, answer.text
    assert answer.json()["quarantined"] == ["a"]
    assert {fleet.generate(i).json()["meta_info"]["weight_version"] for i in range(6)} == {"one"}
    if do == "fail" and at != "verify":  # it lives: it gets the weights from the log's folder, and is back
        fleet.await_states(a="ready", b="ready")
        assert fleet.direct("a", "/get_weight_version") == {"weight_version": "one"}


@pytest.mark.parametrize("do", ["kill", "fail"])
@pytest.mark.parametrize("at", ["pause", "resume"])
def test_nobody_stays_paused(fleet: Fleet, at: str, do: str) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("a", at, do)
    paused = fleet.http.post("/pause_generation", json={"mode": "in_place"})
    assert paused.status_code == 200, paused.text
    assert fleet.publish(1, "one").status_code == 200
    assert fleet.http.post("/continue_generation", json={}).status_code == 200
    if do == "fail":
        fleet.await_states(a="ready", b="ready")
    assert {fleet.generate(i).json()["meta_info"]["weight_version"] for i in range(6)} == {"one"}


def test_a_pause_that_one_refuses_is_undone(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("a", "pause", "refuse")
    answer = fleet.http.post("/pause_generation", json={"mode": "in_place"})
    assert (answer.status_code, "a: " in answer.text) == (409, True)
    assert not fleet.seen()["paused"]
    assert {fleet.generate(i).status_code for i in range(8)} == {200}


def test_a_member_that_refuses_what_others_did_is_out_and_comes_back(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("b", "apply", "refuse")
    assert fleet.publish(1, "one").json()["quarantined"] == ["b"]
    fleet.await_states(a="ready", b="ready")
    assert fleet.direct("b", "/get_weight_version") == {"weight_version": "one"}


def test_a_late_joiner_gets_weights_and_settings_before_a_request(fleet: Fleet) -> None:
    fleet.start("a").await_states(a="ready")
    assert fleet.publish(1, "one").status_code == 200
    assert fleet.http.put("/tlt/v1/strategy", json={"mode": "off"}).status_code == 200
    fleet.members("b")
    fleet.join("b")
    fleet.await_states(a="ready", b="ready")
    assert fleet.direct("b", "/get_weight_version") == {"weight_version": "one"}
    assert fleet.direct("b", "/tlt/v1/strategy") == {"mode": "off"}


def test_a_late_joiner_waits_where_the_weights_are_not_what_was_published(fleet: Fleet) -> None:
    fleet.start("a").await_states(a="ready")
    assert fleet.publish(1, "one").status_code == 200
    (fleet.folder / "policy-1" / "weights.bin").write_bytes(b"other")
    fleet.members("b")
    fleet.join("b")
    wait_for(lambda: "is not what was published" in fleet.seen()["replicas"][1]["why"], fleet.seen)
    assert fleet.states()["b"] == "stale"
    assert fleet.publish(2, "two").status_code == 200
    fleet.await_states(a="ready", b="ready")


def test_weights_that_came_by_tensors_reach_a_late_joiner_with_the_next(fleet: Fleet) -> None:
    fleet.start("a").await_states(a="ready")
    sent = {"weight_version": "one", "serialized_named_tensors": []}
    assert fleet.http.post("/update_weights_from_tensor", json=sent).status_code == 200
    fleet.members("b")
    fleet.join("b")
    wait_for(lambda: "by the next publication" in fleet.seen()["replicas"][1]["why"], fleet.seen)
    assert fleet.http.post("/update_weights_from_tensor", json=sent | {"weight_version": "two"}).status_code == 200
    fleet.await_states(a="ready", b="ready")


# -- requests of members that fail --


def test_a_request_of_a_member_that_dies_is_sent_again_once(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    for name in "ab":
        fleet.fault(name, "generate", "kill")
    fleet.fault("b", "generate", "kill")
    answer = fleet.generate(1, rid="x", sampling_params={"max_new_tokens": 20}, headers={"X-Session-ID": "s"})
    assert (answer.status_code, answer.headers["X-TLT-Attempt"]) == (503, "2"), "twice dead: the client decides"


def test_it_is_answered_by_the_other(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("a", "generate", "kill")
    answers = [fleet.generate(i, rid=f"r{i}", sampling_params={"max_new_tokens": 20}) for i in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    assert [answer.headers["X-TLT-Attempt"] for answer in answers].count("2") == 1
    assert 'tlt_fleet_resent_total{why="dead"} 1.0' in fleet.http.get("/metrics").text
    begun = {name: seeds(fleet, name) for name in "ab"}
    (twice,) = begun["a"].keys() & begun["b"].keys()
    assert begun["a"][twice] == begun["b"][twice], "the same sample"
    assert len({seed for each in begun.values() for seed in each.values()}) == 12


def seeds(fleet: Fleet, name: str) -> dict[str, str]:
    """Of the requests that a member began to sample."""
    told = map(json.loads, fleet.log(name).read_text().splitlines())
    return {line["rid"]: line["seed"] for line in told if line["event"] == "begin"}


def test_a_seed_that_the_client_gives_is_the_clients(fleet: Fleet) -> None:
    fleet.start("a").await_states(a="ready")
    fleet.generate(1, rid="x", headers={"x-tlt-seed": "5"})
    assert seeds(fleet, "a") == {"x": "5"}


def test_a_stream_that_has_begun_is_cut_off_and_not_sent_again(fleet: Fleet) -> None:
    fleet.start("a").await_states(a="ready")
    fleet.fault("a", "generate", "kill")
    asked = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 40}}
    with (
        pytest.raises(Exception, match=r"peer closed|disconnected|reset"),
        fleet.http.stream("POST", "/generate", json=asked) as answer,
    ):
        for _ in answer.iter_lines():
            pass
    assert 'tlt_fleet_resent_total{why="dead"} 0.0' in fleet.http.get("/metrics").text


def test_a_member_that_hangs_gets_no_more_requests(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.kill("a", signal.SIGSTOP)
    fleet.await_states(a="quarantined", b="ready")
    assert {fleet.generate(i).headers["X-TLT-Replica"] for i in range(6)} == {"b"}
    assert fleet.publish(1, "one").json().get("quarantined") is None
    fleet.kill("a", signal.SIGCONT)
    fleet.await_states(a="ready", b="ready")
    assert fleet.direct("a", "/get_weight_version") == {"weight_version": "one"}


def test_a_member_that_was_changed_by_others_is_found_by_its_refusal(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.publish(1, "one").status_code == 200
    fleet.run(fleet.front._upkeep.close())  # before a probe does
    import httpx

    httpx.post(fleet.urls["a"] + "/update_weight_version", json={"new_version": "x"}).raise_for_status()
    answers = [fleet.generate(i) for i in range(8)]
    assert {(answer.status_code, answer.json()["meta_info"]["weight_version"]) for answer in answers} == {(200, "one")}
    assert [answer.headers["X-TLT-Attempt"] for answer in answers].count("2") == 1
    assert fleet.states() == {"a": "stale", "b": "ready"}


# -- the front itself --


def test_a_front_is_rebuilt_from_its_log_and_its_members(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.publish(1, "one").status_code == 200
    assert fleet.http.put("/tlt/v1/strategy", json={"mode": "off"}).status_code == 200
    fleet.stop()
    fleet.member("c")
    fleet.start("a", "b", "c").await_states(a="ready", b="ready", c="ready")
    assert fleet.seen()["weight_version"] == "one"
    assert fleet.direct("c", "/tlt/v1/strategy") == {"mode": "off"}
    assert fleet.publish(2).status_code == 200
    assert fleet.seen()["weight_version"] == "fleet-2"


@pytest.mark.parametrize("at", ["apply", "applied"])
def test_a_front_that_went_in_the_middle_asks_its_members(fleet: Fleet, at: str) -> None:
    """One has it, or none; the other hangs, and is dead by then."""
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("a", at, "stop")
    if at == "apply":
        fleet.fault("b", "apply", "stop")
    with ThreadPoolExecutor() as pool:
        cut = pool.submit(fleet.publish, 1, "one")
        fleet.await_stopped("a")
        fleet.stop()
        cut.exception()
    for name in "ab":
        fleet.kill(name, signal.SIGCONT if at == "applied" else signal.SIGKILL)
    if at == "apply":
        fleet.members("a", "b")
    fleet.start("a", "b").await_states(a="ready", b="ready")
    version = "one" if at == "applied" else "default"
    assert fleet.seen()["weight_version"] == version
    assert {fleet.generate(i).json()["meta_info"]["weight_version"] for i in range(8)} == {version}


def test_a_front_that_was_paused_still_is(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    fleet.stop()
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.seen()["paused"]
    assert fleet.http.post("/continue_generation", json={}).status_code == 200
    assert fleet.generate(1).status_code == 200
