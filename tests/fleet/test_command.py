"""`tlt-server fleet`: what it refuses, and a fleet of members that run already; of replicas that Ray keeps."""

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.fleet.conftest import Fleet, wait_for
from tlt_server.cli import app
from tlt_server.errors import ConfigError
from tlt_server.process import free_port


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --replicas, or --member"),
        (["--member", "localhost:1"], "--member localhost:1: must begin with http"),
        (["--member", "http://a:1", "--router", "b:2"], "--router b:2: must begin with http"),
        (["--member", "http://a:1", "--tp-size", "2"], "--tp-size: a flag of `tlt-server serve`"),
        (["--member", "http://a:1", "--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(flags: list[str], said: str) -> None:
    answer = CliRunner().invoke(app, ["fleet", *flags])
    assert isinstance(answer.exception, ConfigError)
    assert said in str(answer.exception)


@contextlib.contextmanager
def running(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


def told(url: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = httpx.get(f"{url}/tlt/v1/fleet").json()["replicas"]
    except httpx.TransportError:
        return []
    return found


def states(url: str) -> list[str]:
    return [each["state"] for each in told(url)]


@pytest.mark.slow
def test_members_that_run_already(fleet: Fleet, tmp_path: Path) -> None:
    fleet.members("a", "b")
    port, log = free_port(), tmp_path / "front.log"
    members = [word for name in "ab" for word in ("--member", fleet.urls[name])]
    with running(log, "tlt_server", "fleet", "--port", str(port), *members) as front:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: "ready (2 of 2)" in log.read_text(), log.read_text, 30)
        assert states(url) == ["ready", "ready"]
        assert httpx.post(f"{url}/generate", json={"input_ids": [1]}).status_code == 200
        taken = CliRunner().invoke(app, ["fleet", "--port", str(port), *members])
        assert f"port {port} on 127.0.0.1: Address already in use" in str(taken.exception)
    assert front.returncode == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_replicas_that_ray_keeps(tmp_path: Path) -> None:
    """One that is killed has another in its place; Ctrl-C ends all of them."""
    pytest.importorskip("ray.serve", reason="Ray Serve: pip install tlt-server[fleet]", exc_type=ImportError)
    port, log, logs = free_port(), tmp_path / "front.log", tmp_path / "logs"
    url = f"http://127.0.0.1:{port}"
    logs.mkdir()
    command = ["benchmarks.lib.fleet.front", "--replicas", "2", "--port", str(port), "--logs", str(logs)]
    with running(log, *command, "--state", str(tmp_path / "state")):
        wait_for(lambda: states(url) == ["ready", "ready"], log.read_text, 180)
        victim = told(url)[0]
        httpx.post(f"{victim['url']}/faults", json={"at": "generate", "do": "kill"}).raise_for_status()
        answers = [httpx.post(f"{url}/generate", json={"input_ids": [i], "rid": str(i)}, timeout=30) for i in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        wait_for(lambda: sorted(states(url)) == ["ready", "ready", "retired"], log.read_text, 180)
        urls = [each["url"] for each in told(url)]
    for each in urls:
        wait_for(lambda each=each: not answers_at(each), within_s=10)  # type: ignore[misc]


def answers_at(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def test_ray_is_asked_for_where_it_is_missing() -> None:
    if importlib.util.find_spec("grpc") is not None:
        pytest.skip("Ray Serve is installed")
    answer = CliRunner().invoke(app, ["fleet", "--replicas", "1", "--port", str(free_port())])
    assert "--member for running servers" in str(answer.exception)
