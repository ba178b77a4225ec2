"""What is aborted comes back as a rollout with what it has, a part of what it would have been; who hangs up is gone."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tlt_client import Client, StrategyUpdate
from transformers import AutoTokenizer

from benchmarks.lib.safety.aborts import Judge, disturb
from tests.server.conftest import PROMPTS
from tlt_server.demo import default_paths

LONG = {"temperature": 0, "max_new_tokens": 700, "ignore_eos": True}
OPENAI = {"model": "default", "max_tokens": 700, "temperature": 0, "ignore_eos": True, "logprobs": 1}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("/generate", {"text": PROMPTS[0], "sampling_params": LONG, "return_logprob": True}),
    "streamed": ("/generate", {"text": PROMPTS[1], "sampling_params": LONG, "stream": True}),
    "batch": ("/generate", {"text": PROMPTS[2:5], "sampling_params": LONG, "return_logprob": True}),
    "group": ("/generate", {"text": PROMPTS[5], "sampling_params": LONG | {"n": 3}}),
    "completion": ("/v1/completions", OPENAI | {"prompt": PROMPTS[6]}),
    "completions": ("/v1/completions", OPENAI | {"prompt": PROMPTS[6:8], "n": 2, "temperature": 1}),
    "chat": ("/v1/chat/completions", OPENAI | {"messages": [{"role": "user", "content": "7*8?"}], "logprobs": True}),
    "streamed completion": ("/v1/completions", OPENAI | {"prompt": PROMPTS[7], "stream": True}),
}
WITHIN_S = 0.5


class Requests:
    """Requests of every shape, sent at once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = ThreadPoolExecutor(len(SHAPES))

    def send(self) -> "list[Future[httpx.Response]]":
        return [self._pool.submit(self._post, *each) for each in SHAPES.values()]

    def _post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{route}", json=body, timeout=60)


@pytest.fixture
def requests(url: str) -> Iterator[Requests]:
    with Client(url) as client:
        client.set_strategy(StrategyUpdate("pinned"))
    yield Requests(url)
    order(url, "continue_generation")


def order(url: str, route: str, **fields: Any) -> None:
    httpx.post(f"{url}/{route}", json=fields, timeout=60).raise_for_status()


def requests_at(url: str) -> int:
    return sum(each["num_reqs"] for each in httpx.get(f"{url}/get_load").json())


def await_load(url: str, wanted: Any) -> float:
    """Seconds until the server's number of requests is as wanted."""
    began = time.monotonic()
    while not wanted(requests_at(url)):
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    return time.monotonic() - began


def rollouts(response: httpx.Response) -> list[dict[str, Any]]:
    """Of any shape: the last that came of each, with `finish_reason`."""
    assert response.status_code == 200, response.text
    found: dict[int, dict[str, Any]] = {}
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    bodies = [json.loads(line) for line in lines] if lines else [response.json()]
    for body in bodies[0] if isinstance(bodies[0], list) else bodies:
        for each in body.get("choices", [body]):
            meta = each.get("meta_info", {"finish_reason": {"type": each.get("finish_reason")}})
            reason = (meta["finish_reason"] or {}).get("type")
            found[len(found) if not lines else each.get("index", 0)] = each | {"reason": reason}
    return list(found.values())


def check_aborted(answers: "list[Future[httpx.Response]]") -> None:
    counts = [len([each for each in rollouts(done.result(60)) if each["reason"] == "abort"]) for done in answers]
    assert counts == [1, 1, 3, 3, 1, 4, 1, 1]
    for answer in rollouts(answers[0].result()) + rollouts(answers[2].result()):
        meta = answer["meta_info"]
        spans = meta.get("weight_versions") or [{"end": 0}]
        count = len(answer["output_ids"])
        assert count == meta["completion_tokens"] == len(meta["output_token_logprobs"]) == spans[-1]["end"] < 700
        assert meta["prompt_tokens"] > 5


@pytest.mark.server("eagle-arms")
def test_what_a_pause_meets_comes_back_as_a_rollout(requests: Requests) -> None:
    """What runs, what comes while the pause waits for it, and what comes later and is aborted then. On a busy machine
    some of what was to come meanwhile comes later."""
    url = requests.url
    running = requests.send()
    await_load(url, lambda load: load >= 6)
    pausing = threading.Thread(target=order, args=(url, "pause_generation"))
    pausing.start()
    time.sleep(0.1)  # it looks once a second whether all have come back
    meanwhile = requests.send()
    pausing.join()
    check_aborted(running)
    later = requests.send()
    time.sleep(0.5)
    assert not any(answer.done() for answer in later)
    began = time.monotonic()
    while not all(answer.done() for answer in meanwhile + later):  # on a busy machine some have not come yet
        assert time.monotonic() - began < 60
        order(url, "abort_request", abort_all=True)
        time.sleep(0.05)
    check_aborted(meanwhile)
    check_aborted(later)
    assert requests_at(url) == 0


@pytest.mark.server("tight-arms")
def test_requests_that_wait_or_are_prefilled_come_back_whole(requests: Requests) -> None:
    """The pool holds two or three of them, and prompts come in chunks; a grammar is compiled meanwhile."""
    url = requests.url
    draw = random.Random(3)
    for trial in range(2):
        answers = requests.send()
        pattern = rf"(a|b{{1,{trial + 2}}}){{200,400}}"
        body = {"text": PROMPTS[0], "sampling_params": LONG | {"regex": pattern, "ignore_eos": False}}
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(httpx.post, f"{url}/generate", json=body, timeout=60)
            await_load(url, lambda load: load > 0)
            time.sleep(draw.uniform(0, 0.4))
            for _ in range(20):  # until all have come
                order(url, "abort_request", abort_all=True)
                time.sleep(0.05)
        check_aborted(answers)
        assert rollouts(compiled.result())[0]["reason"] == "abort"


@pytest.mark.server("tight-arms")
def test_outputs_are_what_would_have_been_generated(url: str) -> None:
    """As `python -m benchmarks safe` does it for 2,000."""
    judge = Judge(AutoTokenizer.from_pretrained(default_paths()[0]))
    asyncio.run(disturb(url, judge, random.Random(5), 30))
    assert judge.aborts >= 30
    assert (judge.beyond_end, judge.without_rollout) == (0, 0)
    await_load(url, lambda load: load == 0)


@pytest.mark.server("eagle-arms")
@pytest.mark.parametrize("shape", SHAPES)
def test_who_hangs_up_is_gone_at_once(url: str, shape: str) -> None:
    """The better of two: cores that are busy with something else may make one late."""
    assert min(hang_up(url, *SHAPES[shape]) for _ in range(2)) < WITHIN_S


def hang_up(url: str, route: str, fields: dict[str, Any]) -> float:
    """Seconds until an idle server is idle again after a client has left."""
    await_load(url, lambda load: load == 0)
    body = json.dumps(fields).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
        client.sendall(head.encode() + body)
        await_load(url, lambda load: load > 0)
    return await_load(url, lambda load: load == 0)
