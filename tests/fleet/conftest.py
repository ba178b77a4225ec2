"""Fleets of stand-ins: real processes and sockets, the front in a thread of this one."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.lib.fleet.stand_in import write_checkpoint
from tests.forks import Fork, forked
from tlt_server.fleet.front import Front
from tlt_server.fleet.links import Limits
from tlt_server.keys import Keys
from tlt_server.process import free_port

QUICK = Limits(probe_every=0.1, probe=3.0, call=6.0, patience=5.0)
"""But not so quick that a member is given up which a slow machine stops for a second."""
NO_KEYS = Keys()


class Fleet:
    """A front, and stand-ins by name. All are ended with it."""

    def __init__(self, folder: Path, limits: Limits = QUICK, min_ready: int = 1, keys: Keys = NO_KEYS) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, Fork] = {}
        self.urls: dict[str, str] = {}
        self._limits, self._min_ready, self._keys = limits, min_ready, keys
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.front: Front | None = None

    # -- stand-ins --

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def member(self, name: str, *flags: str) -> str:
        """Starts one; the front does not know it yet."""
        port = free_port()
        own = ["--port", str(port), "--name", name, "--log", str(self.log(name))]
        said = self.folder / f"{name}.log"
        self.processes[name] = forked([*own, *flags], said, program="benchmarks.lib.fleet.stand_in")
        self.urls[name] = f"http://127.0.0.1:{port}"
        return self.urls[name]

    def members(self, *names: str) -> None:
        for name in names:
            self.member(name)
        for name in names:
            wait_for(lambda name=name: answers(self.urls[name]))

    def fault(self, name: str, at: str, do: str) -> None:
        httpx.post(f"{self.urls[name]}/faults", json={"at": at, "do": do}).raise_for_status()

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        os.kill(self.processes[name].pid, how)
        if how == signal.SIGKILL:
            self.processes[name].wait()

    def await_stopped(self, name: str) -> None:
        """By a fault of its own."""
        process = psutil.Process(self.processes[name].pid)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED)

    # -- the front --

    def run(self, coroutine: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)
        except TimeoutError as error:
            raise AssertionError("\n".join(map(repr, asyncio.all_tasks(self.loop)))) from error

    def start(self, *names: str) -> "Fleet":
        """A front over these, started if they were not; returns once all are ready."""
        self.members(*(name for name in names if name not in self.processes))
        self.front = Front(self.folder / "state", self._min_ready, self._limits, self._keys)
        self.run(self.front.start("127.0.0.1", self.port, {name: self.urls[name] for name in names}))
        return self

    def stop(self) -> None:
        if self.front is not None:
            self.run(self.front.close())
            self.front = None

    def join(self, name: str) -> None:
        body = {"name": name, "url": self.urls[name]}
        self.http.post("/tlt/v1/fleet/members", json=body).raise_for_status()

    def close(self) -> None:
        self.http.close()
        self.stop()
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # -- asked --

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/tlt/v1/fleet").raise_for_status().json()
        return found

    def states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.seen()["replicas"]}

    def await_states(self, **states: str) -> None:
        wait_for(lambda: self.states() == states, self.seen)

    def publish(self, seed: int, version: str | None = None) -> httpx.Response:
        folder = write_checkpoint(self.folder / f"policy-{seed}", seed)
        named = {} if version is None else {"weight_version": version}
        return self.http.post("/update_weights_from_disk", json={"model_path": str(folder), **named})

    def generate(self, *prompt: int, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        return self.http.post("/generate", json={"input_ids": list(prompt or (1, 2)), **fields}, headers=headers)

    def direct(self, name: str, path: str) -> Any:
        return httpx.get(self.urls[name] + path).json()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(holds: Callable[[], bool], told: Callable[[], Any] = lambda: "", within_s: float = 15.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until:
            pytest.fail(f"{told()}")
        time.sleep(0.02)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()
