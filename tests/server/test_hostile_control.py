"""Hostile requests to every route, ours and SGLang's: no process ends, no answer is 5xx, and the server stays right."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from benchmarks.lib.safety.odd import NO_JSON
from benchmarks.lib.safety.routes import Case, Watched, corpus, endless, fire
from tests.server.conftest import CONFIGS, Servers
from tlt_server.api.bodies import BODIES
from tlt_server.api.fields.routes import UNSERVED
from tlt_server.api.rollouts.gate import MAX_CONTROL
from tlt_server.process import Running

pytestmark = pytest.mark.server("eagle-chain")

KEPT = Path(__file__).parent / "hostile/control.jsonl"
"""What once ended a server, or was answered 5xx, found by these tests and the benchmark."""


@pytest.fixture
def watched(config: str, servers: Servers) -> Iterator[Watched]:
    url = servers.get(CONFIGS[config])
    watched = Watched(Running(url, servers.pid))
    yield watched
    watched.close()


def all_is_well(watched: Watched) -> bool:
    return not watched.found and set(watched.counts) == {"hostile_requests"}


def test_what_was_found_once_is_mended(watched: Watched, tmp_path: Path) -> None:
    cases = corpus(KEPT)
    assert fire(watched, iter(cases), len(cases), tmp_path)
    assert all_is_well(watched), watched.found


@pytest.mark.parametrize(("config", "count"), [("eagle-chain", 200), ("vllm", 100)])
@pytest.mark.server
def test_every_route_outlasts_fuzzing(watched: Watched, servers: Servers, url: str, count: int, tmp_path: Path) -> None:
    """Mutated bodies, and schemathesis' by the server's own OpenAPI document, in turn. 2,500 are sent by
    `python -m benchmarks safe`."""
    try:
        assert fire(watched, endless(url, Random(22)), count, tmp_path)
        assert all_is_well(watched), watched.found
    finally:
        servers.close()  # what was rightly asked for is done, as a drafter frozen, and no other test expects it


@pytest.mark.parametrize("path", ["/tlt/v1/strategy", "/tlt/v1/trainer", "/pause_generation", "/freeze_gc", "/nowhere"])
def test_a_long_body_is_refused(url: str, path: str) -> None:
    method = "PUT" if path == "/tlt/v1/strategy" else "POST"
    answer = httpx.request(method, f"{url}{path}", content=b" " * (MAX_CONTROL + 1))
    assert answer.status_code == 413
    assert httpx.get(f"{url}/health").status_code == 200


def test_no_body_at_all(watched: Watched, tmp_path: Path) -> None:
    cases = [Case("POST", path, body) for path in BODIES for body in NO_JSON[1:6]]
    assert fire(watched, iter(cases), len(cases), tmp_path)
    assert all_is_well(watched), watched.found


@pytest.mark.parametrize("path", UNSERVED)
def test_what_is_not_served_says_why(url: str, path: str) -> None:
    answer = httpx.post(f"{url}{path}", json={})
    assert answer.status_code == 404
    assert UNSERVED[path] in answer.json()["message"]


def test_no_folder_is_made_where_the_server_happens_to_run(url: str) -> None:
    answer = httpx.post(f"{url}/tlt/v1/target/share", json={"path": "here"})
    assert answer.status_code == 400
    assert "must be absolute" in answer.text
