"""Requests that a server must refuse, and those it must not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytestmark = pytest.mark.server("eagle-chain")

INEXACT = {"custom_logit_processor": "p", "return_sampling_mask": True}
SERVED = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.2,
    "min_p": 0,
    "top_k": -1,
    "top_p": 1.0,
    "sampling_seed": 3,
}


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


def ask(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/generate", json={"text": "What is 3*4?\n", "sampling_params": {"max_new_tokens": 4}} | fields)


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_requests_are_refused(http: httpx.Client, name: str) -> None:
    answer = ask(http, **{name: INEXACT[name]})
    assert answer.status_code == 400
    assert name in answer.text
    assert "--no-speculation" in answer.text


@pytest.mark.parametrize("name", SERVED)
def test_exact_ones_pass(http: httpx.Client, name: str) -> None:
    assert ask(http, sampling_params={"max_new_tokens": 4, name: SERVED[name]}).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_the_openai_routes_refuse_too(http: httpx.Client, route: str) -> None:
    asked = {"prompt": "3*4"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "3*4"}]}
    answer = http.post(route, json={"model": "m", "max_tokens": 4, "custom_logit_processor": "p", **asked})
    assert answer.status_code == 400
    assert "custom_logit_processor" in answer.text


MALFORMED = {
    "not JSON": (b'{"text": ', 400),
    "not an object": (b"[1, 2]", 400),
    "a wrong type": (b'{"text": 5, "sampling_params": {"temperature": "hot"}}', 400),
    "no prompt": (b'{"sampling_params": {}}', 400),
    "longer than the context": (b'{"text": "3", "sampling_params": {"max_new_tokens": 100000}}', 400),
    "a token that does not exist": (b'{"input_ids": [1000000]}', 400),
    "a negative token": (b'{"input_ids": [5, -1]}', 400),
    "a batch with one": (b'{"input_ids": [[5], [295]]}', 400),
    "an impossible value": (b'{"text": "3", "sampling_params": {"top_p": 7}}', 400),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_requests_are_refused_and_the_server_goes_on(http: httpx.Client, kind: str) -> None:
    body, status = MALFORMED[kind]
    answer = http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.text.strip()
    assert "Traceback" not in answer.text
    assert ask(http).status_code == 200


NOTHING = {"json_schema": '{"$ref": "#"}'}
DEAD_END = {"ebnf": 'root ::= "3" nothing\nnothing ::= nothing'}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_grammar_that_nothing_fits_ends_its_own_request_alone(http: httpx.Client, temperature: int) -> None:
    """Where nothing can be told at the beginning, it ends as soon as it is at its dead end."""
    kept = {"max_new_tokens": 48, "temperature": 1, "sampling_seed": 5, "ignore_eos": True}
    wanted = ask(http, sampling_params=kept).json()["output_ids"]

    def constrained(grammar: dict[str, str]) -> httpx.Response:
        return ask(http, sampling_params={"max_new_tokens": 8, "temperature": temperature, **grammar})

    with ThreadPoolExecutor(3) as pool:
        beside = pool.submit(ask, http, sampling_params=kept)
        refused, ended = (pool.submit(constrained, grammar) for grammar in (NOTHING, DEAD_END))
        assert refused.result().status_code == 400
        assert "grammar allows no token" in refused.result().text
        assert ended.result().json()["text"] == "3"
        assert ended.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert beside.result().json()["output_ids"] == wanted
