"""A batch is dealt out to several members, and its answer is that of one."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.conftest import Fleet, wait_for
from tlt_server.fleet.requests.batches import batch_of

NAMES = ["a", "b", "c"]
prompts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=2, max_size=12)


def generated(body: dict[str, Any], samples: int) -> bytes:
    """What a member answers to /generate: of each sample, what was asked for it."""
    several = len(body["input_ids"])
    rids, params = body.get("rid", [None] * several), body["sampling_params"]
    return json.dumps(
        [
            {"ids": prompt, "k": k, "rid": rids[i], "p": params[i] if isinstance(params, list) else params}
            for i, prompt in enumerate(body["input_ids"])
            for k in range(samples)
        ]
    ).encode()


@given(prompts, st.integers(1, 3), st.sampled_from([None, "x", "each"]), st.booleans())
def test_parts_are_answered_as_the_whole_would_be(
    given_: list[list[int]], samples: int, rid: str | None, own: bool
) -> None:
    params: Any = [{"top_k": i} for i in range(len(given_))] if own else {"n": samples}
    named = {} if rid is None else {"rid": rid if rid == "x" else [f"r{i}" for i in range(len(given_))]}
    whole = {"input_ids": given_, "sampling_params": params, "stream": False, **named}
    batch = batch_of("/generate", json.dumps(whole).encode())
    assert batch is not None
    dealt = batch.dealt({}, NAMES)
    assert sorted(place for places in dealt.values() for place in places) == list(range(len(given_)))
    answers = [(places, generated(json.loads(batch.part(places)), samples)) for places in dealt.values()]
    if rid == "x":
        whole["rid"] = [f"x_{i}" for i in range(len(given_))]
    assert json.loads(batch.merged(answers)) == json.loads(generated(whole, samples))


@given(prompts, st.integers(1, 3))
def test_choices_are_numbered_anew_and_usage_is_summed(given_: list[list[int]], samples: int) -> None:
    def answer(of: list[list[int]]) -> bytes:
        choices = [{"index": i, "ids": prompt} for i, prompt in enumerate(p for p in of for _ in range(samples))]
        usage = {"prompt_tokens": len(of), "prompt_tokens_details": None, "more": {"n": 1}}
        return json.dumps({"id": "c", "choices": choices, "usage": usage}).encode()

    batch = batch_of("/v1/completions", json.dumps({"prompt": given_, "n": samples}).encode())
    assert batch is not None
    dealt = batch.dealt({}, NAMES)
    parts = [(places, answer([given_[place] for place in places])) for places in dealt.values()]
    merged = json.loads(batch.merged(parts))
    assert merged["choices"] == json.loads(answer(given_))["choices"]
    assert merged["usage"] == {
        "prompt_tokens": len(given_),
        "prompt_tokens_details": None,
        "more": {"n": len(dealt)},
    }


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30))
def test_equal_prompts_stay_together_and_nobody_has_much_more(groups: list[int]) -> None:
    given_ = [[number, 7] for number, size in enumerate(groups) for _ in range(size)]
    batch = batch_of("/generate", json.dumps({"input_ids": given_}).encode())
    assert batch is not None
    dealt = batch.dealt({}, NAMES)
    at = {place: name for name, places in dealt.items() for place in places}
    assert all(at[i] == at[i + 1] for i in range(len(given_) - 1) if given_[i] == given_[i + 1])
    assert max(map(len, dealt.values())) <= 1.25 * len(given_) / 3 + 4 + max(groups)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1, 2]}),
        ("/generate", {"input_ids": [[1]]}),
        ("/generate", {"input_ids": [[1], [2]], "stream": True}),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["x"]}),
        ("/generate", {"input_ids": [[1], [2]], "who_knows": [1, 2]}),
        ("/generate", {"input_ids": [[1], [2]], "text": ["a", "b"]}),
        ("/generate", {"input_ids": [[1], 2]}),
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}, {"role": "user"}]}),
    ],
)
def test_what_cannot_be_split_is_not(path: str, body: dict[str, Any]) -> None:
    assert batch_of(path, json.dumps(body).encode()) is None


@given(st.binary())
def test_no_body_is_too_much(body: bytes) -> None:
    assert batch_of("/generate", body) is None


def test_tokens_asked_for_of_all_prompts_are_not_dealt_out() -> None:
    for given_, part in (([5, 6], [5, 6]), ([[5], [6]], [[6]])):
        asked = {"input_ids": [[1], [2]], "token_ids_logprob": given_, "sampling_params": [{}, {"sampling_seed": 3}]}
        batch = batch_of("/generate", json.dumps(asked).encode())
        assert batch is not None
        assert json.loads(batch.part([1]))["token_ids_logprob"] == part
        assert (batch.told([0, 1]), batch.told([1])) == ("0,0", "0"), "a seed of its own counts its own samples"


# -- over members --

MANY = {"input_ids": [[number, 1] for number in range(24) for _ in range(2)], "rid": "many"}


def begun(fleet: Fleet, name: str) -> list[str]:
    told = map(json.loads, fleet.log(name).read_text().splitlines())
    return [line["rid"] for line in told if line["event"] == "begin"]


@pytest.mark.slow
def test_a_batch_is_sampled_by_all_members(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    answer = fleet.http.post("/generate", json=MANY)
    direct = fleet.http.post(fleet.urls["a"] + "/generate", json=MANY)
    assert answer.json() == direct.json()
    assert set(answer.headers["X-TLT-Replica"].split(",")) == {"a", "b"}
    asked = {"prompt": MANY["input_ids"], "n": 2, "max_tokens": 4, "request_id": "c"}
    whole = fleet.http.post("/v1/completions", json=asked).json()
    assert whole == fleet.http.post(fleet.urls["b"] + "/v1/completions", json=asked).json()
    assert min(len(begun(fleet, name)) for name in "ab") > 48
    together = fleet.http.post("/generate", json=MANY, headers={"X-Session-ID": "s"})
    assert together.headers["X-TLT-Replica"] in "ab"
    assert "tlt_fleet_split_total 2.0" in fleet.http.get("/metrics").text
    wait_for(lambda: not any(each["running"] for each in fleet.seen()["replicas"]))


@pytest.mark.slow
def test_a_part_of_a_member_that_dies_is_sent_again_alone(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    fleet.fault("a", "generate", "kill")
    answer = fleet.http.post("/generate", json=MANY)
    assert (answer.status_code, answer.headers["X-TLT-Attempt"]) == (200, "2")
    assert [each["meta_info"]["id"] for each in answer.json()] == [f"many_{place}" for place in range(48)]
    assert sorted(begun(fleet, "b")) == sorted(f"many_{place}" for place in range(48))


@pytest.mark.slow
def test_an_abort_reaches_all_parts(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    with ThreadPoolExecutor() as pool:
        long = MANY | {"rid": [f"r{place}" for place in range(48)], "sampling_params": {"max_new_tokens": 5000}}
        running = pool.submit(fleet.http.post, "/generate", json=long)
        wait_for(lambda: min(len(begun(fleet, name)) for name in "ab") > 0)
        for place in range(48):
            fleet.http.post("/abort_request", json={"rid": f"r{place}"}).raise_for_status()
        assert {each["meta_info"]["finish_reason"]["type"] for each in running.result().json()} == {"abort"}


@pytest.mark.slow
def test_a_batch_that_is_held_is_aborted_whole(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    assert fleet.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    with ThreadPoolExecutor() as pool:
        one = pool.submit(fleet.http.post, "/generate", json=MANY)
        asked = {"prompt": MANY["input_ids"], "n": 2, "request_id": "c"}
        other = pool.submit(fleet.http.post, "/v1/completions", json=asked)
        wait_for(lambda: fleet.seen()["held"] == 4)
        for rid in ("many", "c"):
            assert fleet.http.post("/abort_request", json={"rid": rid}).status_code == 200
        assert [each["meta_info"]["id"] for each in one.result().json()] == [f"many_{place}" for place in range(48)]
        assert [each["index"] for each in other.result().json()["choices"]] == list(range(96))


@pytest.mark.slow
def test_what_is_on_a_member_that_hangs_is_answered_by_another(fleet: Fleet) -> None:
    fleet.start("a", "b").await_states(a="ready", b="ready")
    with ThreadPoolExecutor(8) as pool:
        lasting = {"max_new_tokens": 2000}
        running = [
            pool.submit(fleet.generate, number, rid=f"r{number}", sampling_params=lasting) for number in range(8)
        ]
        wait_for(lambda: len(begun(fleet, "a")) + len(begun(fleet, "b")) == 8 and len(begun(fleet, "a")) > 0)
        hung = begun(fleet, "a")
        fleet.kill("a", signal.SIGSTOP)
        answers = [each.result() for each in running]
        assert {answer.status_code for answer in answers} == {200}
        again = [answer.json()["meta_info"]["id"] for answer in answers if answer.headers["X-TLT-Attempt"] == "2"]
        assert sorted(again) == sorted(hung)
        fleet.kill("a", signal.SIGCONT)
        fleet.await_states(a="ready", b="ready")
    told = [json.loads(line) for line in fleet.log("a").read_text().splitlines()]
    ends = [line for line in told if line["event"] == "end" and line["rid"] in hung]
    assert not any(line["whole"] for line in ends), "the end of the connection ended them"
    assert f'tlt_fleet_resent_total{{why="quarantined"}} {len(hung)}.0' in fleet.http.get("/metrics").text


@pytest.mark.slow
def test_a_stream_of_a_member_that_hangs_is_cut_off(fleet: Fleet) -> None:
    fleet.start("a").await_states(a="ready")
    asked = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 4000}}
    with fleet.http.stream("POST", "/generate", json=asked) as answer:
        events = answer.iter_lines()
        next(events)
        fleet.kill("a", signal.SIGSTOP)
        with pytest.raises(Exception, match=r"peer closed|disconnected|reset"):
            list(events)
    fleet.kill("a", signal.SIGCONT)
