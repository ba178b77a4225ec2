"""A real sglang-router that the front tells of its ready members."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet.conftest import QUICK, Fleet, answers, wait_for
from tlt_server.fleet.front import Beside, Front
from tlt_server.keys import Keys
from tlt_server.process import free_port

pytestmark = pytest.mark.slow

RUN = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
port, metrics = map(int, sys.argv[1:])
Router.from_args(RouterArgs(host="127.0.0.1", port=port, policy="round_robin", prometheus_port=metrics)).start()
"""


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", RUN, str(port), str(free_port())], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: workers(url) is not None, within_s=60)
        yield url
    finally:
        process.kill()
        process.wait()


def comes(url: str, wanted: set[str]) -> None:
    """A router takes workers in, and out, by and by."""
    wait_for(lambda: workers(url) == wanted, lambda: workers(url), within_s=60)


def workers(url: str) -> set[str] | None:
    """By their URLs; None: it does not answer yet."""
    try:
        return {each["url"] for each in httpx.get(f"{url}/workers").json()["workers"]}
    except httpx.TransportError:
        return None


def started(fleet: Fleet, router: str, *names: str) -> None:
    fleet.members(*names)
    fleet.front = Front(fleet.folder / "state", 1, QUICK, Keys(), Beside(router=router))
    fleet.run(fleet.front.start("127.0.0.1", fleet.port, {name: fleet.urls[name] for name in names}))
    fleet.await_states(**dict.fromkeys(names, "ready"))


def test_a_router_has_the_ready_members_and_no_other(fleet: Fleet, router: str) -> None:
    fleet.member("stranger")
    wait_for(lambda: answers(fleet.urls["stranger"]))
    httpx.post(f"{router}/workers", json={"url": fleet.urls["stranger"]}).raise_for_status()
    started(fleet, router, "a", "b")
    everybody = set(fleet.urls.values())
    comes(router, everybody)
    fleet.kill("b", signal.SIGSTOP)
    comes(router, everybody - {fleet.urls["b"]})
    assert fleet.publish(1, "one").status_code == 200
    fleet.kill("b", signal.SIGCONT)
    comes(router, everybody)
    assert fleet.direct("b", "/get_weight_version") == {"weight_version": "one"}, (
        "it came back with the fleet's weights"
    )
    gone = next(
        each["id"] for each in httpx.get(f"{router}/workers").json()["workers"] if each["url"] == fleet.urls["a"]
    )
    httpx.delete(f"{router}/workers/{gone}").raise_for_status()
    time.sleep(1)  # it may be gone for less than a look takes
    comes(router, everybody)
    assert httpx.post(f"{router}/generate", json={"input_ids": [1]}).json()["output_ids"]
    fleet.stop()
    comes(router, {fleet.urls["stranger"]})


def test_a_router_that_is_not_there_stops_nobody(fleet: Fleet) -> None:
    started(fleet, f"http://127.0.0.1:{free_port()}", "a")
    assert fleet.generate(1).status_code == 200
    failed = [event for event in fleet.seen()["events"] if event["kind"] == "router_failed"]
    assert len(failed) == 1, "said once"
