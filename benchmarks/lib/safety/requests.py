"""Hostile requests at the routes of responses, scores and tokens: none may end the server, nor be its error, nor change
what another request is answered."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.lib.safety.bodies import Hostile, hostile
from tlt_server.process import running_server
from tlt_server.results import Figures

TOGETHER, AT_ONCE = 20, 8
HEADERS = {"content-type": "application/json"}
CONTROL = {"text": "What is 3*4?\n", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
ENDED = 0
"""Stands for a status: no answer came."""


def measure(count: int, seed: int, logs: Path) -> Figures:
    """hostile_requests sent, server_ended, answers_5xx, control_mismatches.

    After each batch of 20 the server must be healthy, and answer a greedy request as it did at first. One that ended is
    started anew, for the rest.
    """
    totals: Figures = {"hostile_requests": 0, "server_ended": 0, "answers_5xx": 0, "control_mismatches": 0}
    requests = list(hostile(count, seed))
    batches = [requests[at : at + TOGETHER] for at in range(0, count, TOGETHER)]
    starts = 0
    while batches:
        log = logs / f"requests-{starts}.log"
        with running_server([], log) as url:
            for found in run(url, batches, logs / "requests-found.jsonl"):
                for name, value in found.items():
                    totals[name] += value
        starts += 1
    return totals


def run(url: str, batches: list[list[Hostile]], kept: Path) -> Iterator[Figures]:
    """What each batch found; takes those that it has sent out of the list, and stops when the server has ended."""
    with httpx.Client(base_url=url, timeout=120) as http:
        first = _control(http)
        while batches:
            batch = batches.pop(0)
            statuses = send(http, batch)
            wrong = [each for each, status in zip(batch, statuses, strict=True) if status >= 500]
            keep(wrong, kept)
            control = _control(http)
            if control is None:
                keep(batch, kept)
            yield {
                "hostile_requests": len(batch),
                "server_ended": control is None,
                "answers_5xx": len(wrong),
                "control_mismatches": control is not None and control != first,
            }
            if control is None:
                return


def keep(found: Iterable[Hostile], path: Path) -> None:
    with path.open("ab") as file:
        file.writelines(f"{each.path}\t".encode() + each.body.replace(b"\n", b" ") + b"\n" for each in found)


def send(http: httpx.Client, requests: Sequence[Hostile]) -> list[int]:
    """Their statuses; `ENDED` where none came."""

    def status(request: Hostile) -> int:
        try:
            return http.post(request.path, content=request.body, headers=HEADERS).status_code
        except httpx.TransportError:
            return ENDED

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(status, requests))


def _control(http: httpx.Client) -> list[int] | None:
    """A greedy answer's token ids; None: there is no healthy server."""
    try:
        health, answer = http.get("/health"), http.post("/generate", json=CONTROL)
    except httpx.TransportError:
        return None
    if health.status_code != 200 or answer.status_code != 200:
        return None
    return list(answer.json()["output_ids"])
