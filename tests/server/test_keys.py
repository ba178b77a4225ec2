"""Who may do what with a real server: its keys, who is shown them, and the ports that it opens."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from benchmarks.lib.safety.gadgets import measure
from tests.server.conftest import EAGLE3, RANKS_APART, Servers
from tests.server.warm import warm_process, warm_server
from tlt_server.process import free_port, running_module

pytestmark = pytest.mark.server

CLIENT, ADMIN = "k-of-clients", "k-of-admins"
GREEDY = {"text": "1+1=", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}


class Server(NamedTuple):
    http: httpx.Client
    processes: list[psutil.Process]
    log: Path

    def status(self, method: str, route: str, key: str | None, **body: object) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.request(method, route, json=body or None, headers=headers).status_code


@pytest.fixture(scope="module")
def server(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tokenizer workers, where SGLang itself checks no key."""
    servers.close()
    log = tmp_path_factory.mktemp("keys") / "log"
    flags = ["--dp-size", "2", "--tokenizer-worker-num", "2", "--api-key", CLIENT, f"--admin-api-key={ADMIN}"]
    with running_module(["tlt_server", "serve"], flags, log, start_timeout=180) as started:
        first = psutil.Process(started.pid)
        with httpx.Client(base_url=started.url, timeout=30) as http:
            yield Server(http, [first, *first.children(recursive=True)], log)


def listeners(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {(c.laddr.ip, c.laddr.port) for c in process.net_connections("inet") if c.status == "LISTEN"}
    return found


def test_routes_ask_for_their_keys(server: Server) -> None:
    for _ in range(4):  # whichever worker answers
        assert server.status("GET", "/health", None) == 200
        assert server.status("GET", "/metrics", None) == 200
        for key, status in ((None, 401), ("wrong", 401), (ADMIN, 401), (CLIENT, 200)):
            assert server.status("POST", "/generate", key, **GREEDY) == status
            assert server.status("GET", "/model_info", key) == status
            assert server.status("GET", "/tlt/v1/status", key) == status
        for key, status in ((None, 401), (CLIENT, 401), (ADMIN, 200)):
            assert server.status("POST", "/flush_cache", key) == status
            assert server.status("PUT", "/tlt/v1/strategy", key, mode="bandit") == status
        for route in ("/update_weights_from_tensor", "/load_lora_adapter_from_tensors", "/set_trace_level?level=0"):
            assert server.status("POST", route, CLIENT) == 401


def test_nobody_is_shown_a_key(server: Server) -> None:
    headers = {"Authorization": f"Bearer {CLIENT}"}
    answers = [server.http.get(route, headers=headers) for route in ("/server_info", "/get_server_info", "/model_info")]
    assert all(answer.status_code == 200 for answer in answers)
    shown = [answer.text for answer in answers] + [server.log.read_text()]
    for process in server.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            shown += [" ".join(process.cmdline()), process.name()]
    assert "server_args=" in server.log.read_text()
    for text in shown:
        assert CLIENT not in text
        assert ADMIN not in text


def test_only_the_http_port_is_open(server: Server) -> None:
    """And that where it was asked for; all else is between processes of this machine."""
    found = listeners(server.processes)
    assert ("127.0.0.1", server.http.base_url.port) in found
    assert {ip for ip, _ in found} == {"127.0.0.1"}


def test_ranks_meet_on_loopback_and_wait_for_no_trainer_for_ever(servers: Servers, tmp_path: Path) -> None:
    servers.close()
    environment = RANKS_APART | {"TLT_API_KEY": CLIENT}
    flags = [*EAGLE3, "--tp-size", "2", "--host", "0.0.0.0"]
    with warm_process(flags, tmp_path / "log", environment) as (url, pid):
        first = psutil.Process(pid)
        found = listeners([first, *first.children(recursive=True)])
        beyond = {(ip, port) for ip, port in found if ip != "127.0.0.1"}
        assert beyond == {("0.0.0.0", httpx.URL(url).port)}
        group = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 3, "group_name": "g"}
        with httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {CLIENT}"}) as http:
            led = http.post("/init_weights_update_group", json=group | {"rank_offset": 0, "backend": "gloo"})
            assert led.status_code == 400
            assert "rank_offset" in led.json()["message"]
            assert http.get("/health").status_code == 200


def test_no_gadget_runs_over_http(servers: Servers, tmp_path: Path) -> None:
    servers.close()
    assert measure(60, 1, tmp_path, warm_server) == {"gadgets_tried": 60, "gadgets_run": 0, "legitimate_refused": 0}
