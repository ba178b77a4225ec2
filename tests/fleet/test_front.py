"""A front over stand-ins, by its sockets: requests, control calls, reads."""

import gzip
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tlt_client.schemas import Fleet as Told
from tlt_client.schemas import Status

from benchmarks.lib.fleet.stand_in import write_checkpoint
from tests.fleet.conftest import NO_KEYS, QUICK, Fleet, wait_for
from tlt_server.keys import Keys

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory):
    fleet = Fleet(tmp_path_factory.mktemp("two")).start("a", "b")
    fleet.await_states(a="ready", b="ready")
    yield fleet
    fleet.close()


def lines(fleet: Fleet, name: str, event: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, fleet.log(name).read_text().splitlines()) if line["event"] == event]


# -- requests --


def test_a_request_passes_byte_by_byte(two: Fleet) -> None:
    answer = two.generate(1, 2, rid="x")
    assert answer.status_code == 200
    assert answer.headers["X-TLT-Attempt"] == "1"
    direct = httpx.post(two.urls["a"] + "/generate", json={"input_ids": [1, 2], "rid": "x"}).json()
    assert answer.json() == direct


def test_a_stream_passes_as_it_comes(two: Fleet) -> None:
    asked = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 6}}
    with two.http.stream("POST", "/generate", json=asked) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        events = [line for line in answer.iter_lines() if line]
    assert [len(json.loads(event[6:])["output_ids"]) for event in events[:-1]] == [1, 2, 3, 4, 5, 6]
    assert events[-1] == "data: [DONE]"


def test_what_sticks_goes_to_one_member(two: Fleet) -> None:
    def places(**how: object) -> set[str]:
        return {two.generate(i, **how).headers["X-TLT-Replica"] for i in range(6)}

    assert places() == {"a", "b"}
    assert len(places(headers={"X-Session-ID": "s"})) == 1
    assert len(places(headers={"X-SMG-Routing-Key": "s"})) == 1
    assert len(places(session_id="s")) == 1
    assert len({two.generate(*range(256), i).headers["X-TLT-Replica"] for i in range(6)}) == 1


def test_a_version_that_the_client_names_is_the_clients(two: Fleet) -> None:
    answer = two.generate(1, headers={"X-TLT-Weight-Version": "another"})
    assert (answer.status_code, two.states()) == (409, {"a": "ready", "b": "ready"})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"input_ids": "x", "rid": 7}', gzip.compress(b"{}", mtime=0), b"\xff" * 99]
)
def test_a_body_that_makes_no_sense_is_the_members_to_refuse(two: Fleet, body: bytes) -> None:
    assert two.http.post("/generate", content=body).status_code >= 400
    assert two.generate(1).status_code == 200


def test_what_is_no_route_is_404_in_one_line(two: Fleet) -> None:
    for method, path in (("GET", "/nothing"), ("POST", "/v1/responses"), ("GET", "/generate"), ("DELETE", "/resume")):
        answer = two.http.request(method, path)
        assert (answer.status_code, "\n" in answer.text) == (404, False)


def test_a_body_that_is_too_large_is_refused(two: Fleet) -> None:
    answer = two.http.post("/generate", content=b"x" * (2**26 + 1))
    assert answer.status_code == 413
    assert two.generate(1).status_code == 200


NO_REQUESTS = [
    b"\0\1\2\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"GET /" + b"a" * 99999 + b" HTTP/1.1\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nContent-Length: 50\r\n\r\nabc",
]


@pytest.mark.parametrize("sent", NO_REQUESTS)
def test_bytes_that_are_no_request_end_their_connection_alone(two: Fleet, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", two.port)) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        while connection.recv(4096):
            pass
    assert two.generate(1).status_code == 200


def test_a_client_that_leaves_ends_its_request_at_the_member(two: Fleet) -> None:
    asked = {"input_ids": [5], "rid": "leaver", "stream": True, "sampling_params": {"max_new_tokens": 5000}}
    with two.http.stream("POST", "/generate", json=asked) as answer:
        next(answer.iter_lines())
    wait_for(lambda: any(line["rid"] == "leaver" for name in "ab" for line in lines(two, name, "end")))
    wait_for(lambda: not any(each["running"] for each in two.seen()["replicas"]))


def test_an_abort_goes_to_who_has_the_request(two: Fleet) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(two.generate, 9, rid="gone", sampling_params={"max_new_tokens": 5000})
        wait_for(lambda: any(line["rid"] == "gone" for name in "ab" for line in lines(two, name, "begin")))
        assert two.http.post("/abort_request", json={"rid": "gone"}).status_code == 200
        assert running.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert [len([x for x in lines(two, name, "abort") if x["rid"] == "gone"]) for name in "ab"].count(1) == 1


# -- reads --


def test_the_fleet_says_what_it_is(two: Fleet) -> None:
    told = msgspec.json.decode(two.http.get("/tlt/v1/fleet").content, type=Told)
    assert [(each.name, each.state, each.why) for each in told.replicas] == [("a", "ready", ""), ("b", "ready", "")]
    assert (told.min_ready, told.paused, told.transaction) == (1, False, None)
    assert [event.number for event in told.events] == sorted(event.number for event in told.events)
    assert two.http.get("/health").status_code == 200


def test_counts_are_sums_and_each_members_own(two: Fleet) -> None:
    answer = two.http.get("/tlt/v1/status")
    status = msgspec.json.decode(answer.content, type=Status)
    assert (status.counters.drafts, status.counters.per_position, status.accept_length.total) == (4, (4, 4), 3.0)
    assert set(answer.json()["replicas"]) == {"a", "b"}
    assert two.http.get("/get_world_size").json() == {"world_size": 4}
    assert len(two.http.get("/v1/loads?include=core").json()["loads"]) == 2
    assert two.http.get("/v1/models").json()["data"][0]["id"] == "stand-in"
    assert two.http.get("/tlt/v1/replicas/a/health").status_code == 200
    assert two.http.get("/tlt/v1/replicas/c/health").status_code == 404


def test_metrics_are_by_replica(two: Fleet) -> None:
    families = {family.name: family for family in text_string_to_metric_families(two.http.get("/metrics").text)}
    assert {sample.labels["replica"] for sample in families["sglang:up"].samples} == {"a", "b"}
    assert {sample.name for sample in families["s"].samples} == {"s_bucket", "s_sum", "s_count"}
    assert sum(sample.value for sample in families["tlt_fleet_requests"].samples) > 0
    assert {sample.labels["state"]: sample.value for sample in families["tlt_fleet_members"].samples}["ready"] == 2
    assert "tlt_fleet_resent" in families


# -- control --


def test_a_publication_reaches_all(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.publish(1, "one").status_code == 200
    assert {fleet.direct(name, "/get_weight_version")["weight_version"] for name in "ab"} == {"one"}
    assert fleet.publish(2).status_code == 200
    assert fleet.seen()["weight_version"] == fleet.http.get("/get_weight_version").json()["weight_version"] == "fleet-2"
    assert {fleet.generate(number).json()["meta_info"]["weight_version"] for number in range(20)} == {"fleet-2"}


def test_what_all_refuse_changes_nothing(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    answer = fleet.http.post("/update_weights_from_disk", json={"model_path": "/nowhere", "weight_version": "one"})
    assert (answer.status_code, answer.json()["message"]) == (400, "/nowhere: No such file or directory")
    assert (fleet.states(), fleet.seen()["weight_version"]) == ({"a": "ready", "b": "ready"}, "default")


def test_a_pause_holds_requests_at_the_front(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(fleet.generate, i, rid=f"held-{i}") for i in range(3)]
        wait_for(lambda: fleet.seen()["held"] == 3)
        assert fleet.http.post("/abort_request", json={"rid": "held-0"}).status_code == 200
        assert held[0].result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert fleet.publish(1, "one").status_code == 200
        assert fleet.seen()["weight_version"] == "default", "it is the fleet's when generation continues"
        assert fleet.http.post("/continue_generation", json={}).status_code == 200
        assert {each.result().json()["meta_info"]["weight_version"] for each in held[1:]} == {"one"}


Calls = list[tuple[str, dict[str, object] | None]]
V: dict[str, object] = {"weight_version": "v"}
BEGUN: Calls = [("/begin_weight_update", {}), ("/update_weights_from_tensor", V), ("/end_weight_update", {})]
VLLMS: Calls = [
    *(("/pause", None), ("/start_weight_update", {}), ("/update_weights", {"update_info": {}})),
    *(("/finish_weight_update", V), ("/resume", None)),
]
PRIME_RLS: Calls = [("/pause?mode=keep", None), ("/update_weights", {"weight_dir": "FOLDER"}), ("/resume", None)]
SLIMES: Calls = [
    *(("/pause_generation", {}), *[("/update_weights_from_distributed", V)] * 3),
    ("/continue_generation", {}),
]


@pytest.mark.parametrize("calls", [BEGUN, VLLMS, PRIME_RLS, SLIMES])
def test_publications_of_several_calls(fleet: Fleet, tmp_path: Path, calls: Calls) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    folder = str(write_checkpoint(tmp_path / "policy", 3))
    for path, body in calls:
        assert fleet.states() == {"a": "ready", "b": "ready"}, "a probe in the middle of it proves nothing"
        time.sleep(0.15)
        named = {key: folder if value == "FOLDER" else value for key, value in (body or {}).items()}
        answer = fleet.http.post(path, json=named) if body is not None else fleet.http.post(path)
        assert answer.status_code == 200, (path, answer.text)
    version = "v" if any("v" in (body or {}).values() for _, body in calls) else "fleet-1"
    assert fleet.seen()["weight_version"] == version
    assert {fleet.generate(i).json()["meta_info"]["weight_version"] for i in range(8)} == {version}
    assert fleet.states() == {"a": "ready", "b": "ready"}


def test_ranks_of_a_group_follow_one_another(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 5, "group_name": "g"}
    assert fleet.http.post("/init_weights_update_group", json=group).status_code == 200
    told = [lines(fleet, name, "group")[-1]["asked"] for name in "ab"]
    assert [(each["rank_offset"], each["world_size"]) for each in told] == [(1, 5), (3, 5)]
    fleet.kill("b")
    fleet.await_states(a="ready", b="quarantined")
    answer = fleet.http.post("/update_weights_from_distributed", json={"group_name": "g", "weight_version": "v"})
    assert (answer.status_code, "b left the trainer's group" in answer.text) == (409, True)
    info = {"init_info": {"rank_offset": 1, "world_size": 3}}
    assert fleet.http.post("/init_weight_transfer_engine", json=info).status_code == 200
    assert lines(fleet, "a", "group")[-1]["asked"] == info


def test_the_same_call_joins_the_one_under_way(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("a", "applied", "stop")
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(fleet.publish, 1, "one") for _ in range(2)]
        fleet.await_stopped("a")
        time.sleep(0.3)  # until the other has come too
        fleet.kill("a")
        assert [each.result().status_code for each in both] == [200, 200]
    assert len(lines(fleet, "b", "wrote")) == 1


def test_keys(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, keys=Keys("client", "admin")).start("a")
    try:
        shown = {key: {"Authorization": f"Bearer {key}"} for key in ("client", "admin", "x")}
        assert [fleet.http.get("/tlt/v1/fleet", headers=shown[key]).status_code for key in shown] == [200, 401, 401]
        wait_for(lambda: fleet.http.get("/health").status_code == 200)
        assert [fleet.http.post("/flush_cache", headers=shown[key]).status_code for key in shown] == [401, 200, 401]
        assert [fleet.http.get(path).status_code for path in ("/metrics", "/v1/models")] == [200, 401]
    finally:
        fleet.close()


def test_enough_must_be_ready(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, QUICK._replace(patience=0.5), min_ready=2, keys=NO_KEYS).start("a", "b")
    try:
        fleet.await_states(a="ready", b="ready")
        fleet.fault("b", "apply", "kill")
        assert (answer := fleet.publish(1, "one")).status_code == 409, answer.text
        assert fleet.http.get("/health").status_code == 503
        answer = fleet.generate(1)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        fleet.members("c")
        fleet.join("c")
        fleet.await_states(a="ready", b="quarantined", c="ready")
        assert fleet.generate(1).json()["meta_info"]["weight_version"] == "one"
    finally:
        fleet.close()
