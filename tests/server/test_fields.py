"""What becomes of the fields of a request, as a client sees it; hostile requests, which change nothing for others."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.lib.safety.bodies import LEGAL, Hostile, hostile
from benchmarks.lib.safety.requests import run, send

pytestmark = pytest.mark.server("eagle-chain")
CORPUS = Path(__file__).parent / "hostile/requests.jsonl"
SHORT = {"max_new_tokens": 4, "temperature": 0}


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as http:
        yield http


def events(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    asked = {"text": ["3*4", "5*6"], "sampling_params": SHORT | {"sampling_seed": 3, "of_mine": 1}, "my_own": {"a": 1}}
    for answer in http.post("/generate", json=asked).json():
        assert sorted(answer["meta_info"]["ignored"]) == ["my_own", "of_mine"]
    streamed = events(http.post("/generate", json=asked | {"stream": True}).text)
    assert streamed
    assert all(len(event["meta_info"]["ignored"]) == 2 for event in streamed)
    plain = http.post("/generate", json={"text": "3*4", "sampling_params": SHORT | {"sampling_seed": None}}).json()
    assert "ignored" not in plain["meta_info"]
    assert 'tlt_ignored_fields_total{name="of_mine"} ' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/v1/completions", {"prompt": "3*4", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "3*4"}], "max_tokens": 4}),
        ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "3*4"}], "max_tokens": 4}),
    ],
)
def test_unknown_fields_are_named_by_other_dialects(http: httpx.Client, route: str, asked: dict) -> None:
    answer = http.post(route, json=asked | {"my_own": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["ignored"] == ["my_own"]
    headers = {"X-TLT-Seed": "5"}
    streamed = events(http.post(route, json=asked | {"my_own": 1, "stream": True}, headers=headers).text)
    assert streamed
    assert all(event["meta_info"] == {"ignored": ["my_own"], "seed": 5} for event in streamed)


@pytest.mark.parametrize("path", LEGAL)
def test_legal_requests_pass(http: httpx.Client, path: str) -> None:
    """Embeddings, which a model that generates does not make, and ranking, which it was not made for, are refused."""
    refused = path in ("/encode", "/classify", "/v1/embeddings", "/v1/rerank")
    for body in LEGAL[path]:
        answer = http.post(path, json=body)
        assert answer.status_code == (400 if refused else 200), (body, answer.text)


def test_a_request_under_an_id_that_is_in_use_harms_nobody(http: httpx.Client, url: str) -> None:
    asked = {"text": "3*4", "rid": "mine", "stream": True}
    slow = asked | {"sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    with http.stream("POST", "/generate", json=slow) as first:
        lines = first.iter_lines()
        next(lines)
        answer = httpx.post(f"{url}/generate", json=asked)
        assert answer.status_code == 400
        assert "under way" in answer.text


def test_logprobs_of_token_ids_beside_requests_without(http: httpx.Client) -> None:
    """In one batch, of prefill and of decoding."""
    asked = {"text": "3*4", "sampling_params": SHORT | {"ignore_eos": True}, "return_logprob": True}
    bodies = [asked | ({"token_ids_logprob": [5, 6]} if i % 2 else {}) for i in range(32)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: http.post("/generate", json=body), bodies))
    assert [answer.status_code for answer in answers] == [200] * 32
    for answer in answers[1::2]:
        logged = answer.json()["meta_info"]["output_token_ids_logprobs"]
        assert [[token for _, token, _ in position] for position in logged] == [[5, 6]] * 4


def test_hostile_requests_end_nothing_and_change_nothing(url: str, tmp_path: Path) -> None:
    requests = list(hostile(120, seed=22))
    found = run(url, [requests[at : at + 20] for at in range(0, 120, 20)], tmp_path / "found")
    for figures in found:
        assert (figures["server_ended"], figures["answers_5xx"], figures["control_mismatches"]) == (0, 0, 0)


def test_what_once_ended_the_server_is_refused(http: httpx.Client) -> None:
    cases = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    corpus = [Hostile(each["path"], base64.b64decode(each["base64"])) for each in cases]
    assert send(http, corpus) == [each["status"] for each in cases]
    assert http.get("/health").status_code == 200
