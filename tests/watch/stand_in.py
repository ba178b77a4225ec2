"""A server, or a fleet's front, as the page and `top` see it: real HTTP, and answers of a real server, recorded, whose
counters go on."""

import contextlib
import copy
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tlt_server.watch.page import FILES, HEADERS

RECORDED = Path(__file__).with_name("recorded.json")
PER_S = {"generated_tokens": 1000, "drafts": 250, "draft_tokens": 1000, "accepted_tokens": 600}
"""How the counters grow: an accept length of 3.4."""
HISTORY = {"tokens": 1_234_567, "capacity": 1 << 24, "bytes": 1 << 30, "written": 2_000_000}
HISTORY |= {"lookups": 8000, "found": 6480, "drafted": 30_000, "accepted": 17_000}
RECALLED_PER_S = {"lookups": 100, "found": 81, "accepted": 220}
"""Of a server that keeps a history: 3.2 tokens a pass, and 81 % found."""
NEWER = ("load", "generated_tokens", "time", "paused", "offloaded", "versions", "trainer", "graphs")
"""Fields of the status that servers of older versions lack."""


class Recorded:
    """A server's answers; each status is `step_s` later than the one before. lacks: fields of the status that a server
    of an older version has not. pace: of its counters, beside PER_S, by its uptime.
    """

    def __init__(self, step_s: float = 1.0) -> None:
        found = json.loads(RECORDED.read_text())
        self.status, self.strategy = found["status"], found["strategy"]
        self.events: list[dict[str, Any]] = found["events"]
        self.step_s, self.reads, self.gone = step_s, 0, False
        self.lacks: tuple[str, ...] = ()
        self.pace: Callable[[float], float] = lambda _: 1.0
        self._shift(time.time() - self.status["time"])

    def _shift(self, seconds: float) -> None:
        """As if recorded now."""
        for each in (self.status, *self.events):
            each["time"] += seconds

    def remembers(self) -> None:
        """It keeps a history, and an arm drafts from it."""
        self.status["history"] = dict(HISTORY)
        for bucket in self.strategy["selection"]["buckets"]:
            arm = {"num_steps": 7, "topk": 1, "num_draft_tokens": 8, "source": "history"}
            bucket["arms"].append({**bucket["arms"][0], "arm": arm, "accept_length": 3.21})

    def event(self, kind: str, **detail: Any) -> None:
        event = {"number": len(self.events) + 1, "time": self.status["time"], "kind": kind, "replica": 0}
        self.events.append({**event, "detail": detail})

    def advance(self) -> None:
        self.reads += 1
        status, counters = self.status, self.status["counters"]
        status["time"] += self.step_s
        status["uptime_s"] += self.step_s
        for name, per_s in PER_S.items():
            (status if name in status else counters)[name] += round(per_s * self.step_s * self.pace(status["uptime_s"]))
        for name, per_s in RECALLED_PER_S.items() if status.get("history") else ():
            status["history"][name] += round(per_s * self.step_s)

    def answer(self, path: str, after: int) -> Any:
        """None: there is no such route."""
        if path == "/tlt/v1/status":
            self.advance()
        events = [event for event in self.events if event["number"] > after][-1000:]
        status = {name: value for name, value in self.status.items() if name not in self.lacks}
        return {"/tlt/v1/status": status, "/tlt/v1/strategy": self.strategy, "/tlt/v1/events": events}.get(path)


CALL = {
    "call": "POST /update_weights_from_disk", "phase": "apply", "version": None,
    "members": ["alpha", "beta"], "waiting_for": ["alpha", "beta"], "since": 0.0,
}  # fmt: skip
"""That is under way."""


class Front:
    """A fleet of recorded servers, by name."""

    def __init__(self, *names: str) -> None:
        self.servers = {name: Recorded() for name in names}
        now = next(iter(self.servers.values())).status["time"]
        ready = {"state": "ready", "why": "", "weight_version": "step-3", "running": 5, "since": now}
        self.fleet: dict[str, Any] = {
            "weight_version": "step-3",
            "min_ready": 1,
            "paused": False,
            "held": 0,
            "transaction": None,
            "replicas": [{"name": name, "url": f"http://{name}:30000", **ready} for name in names],
            "events": [],
        }
        for name in names:
            self.event("joined", name, f"http://{name}:30000")
        self.event("published", None, "step-3")

    def event(self, kind: str, replica: str | None, detail: str) -> None:
        now = next(iter(self.servers.values())).status["time"]
        number = len(self.fleet["events"]) + 1
        self.fleet["events"].append({"number": number, "time": now, "kind": kind, "replica": replica, "detail": detail})

    def replica(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.fleet["replicas"] if each["name"] == name)
        return found

    def answer(self, path: str, after: int) -> Any:
        if path == "/tlt/v1/fleet":
            return self.fleet
        name, _, rest = path.removeprefix("/tlt/v1/replicas/").partition("/")
        server = self.servers.get(unquote(name))
        return None if server is None or server.gone else server.answer(f"/{rest}", after)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "StandIn"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if parts.path in FILES:
            file, kind = FILES[parts.path]
            self.reply(200, file.read_bytes(), kind, HEADERS)
        elif self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, b'{"error":"Unauthorized"}')
        elif self.server.failing:
            self.reply(500, b"no JSON")
        else:
            after = int(parse_qs(parts.query).get("after", ["0"])[0])
            with self.server.lock:
                answer = copy.deepcopy(self.server.seen.answer(parts.path, after))
            self.reply(
                404 if answer is None else 200,
                json.dumps({"detail": "Not Found"} if answer is None else answer).encode(),
            )

    def reply(self, status: int, body: bytes, kind: str = "application/json", headers: Any = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """A line for every poll helps nobody."""


class StandIn(ThreadingHTTPServer):
    """seen: what it answers from. key: that clients must show. failing: it answers 500. asked: path, authorization."""

    daemon_threads = True

    def __init__(self, seen: Recorded | Front, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.seen, self.key, self.failing = seen, None, False
        self.key: str | None
        self.asked: list[tuple[str, str | None]] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._open: set[Any] = set()

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser hangs up as it likes."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        """Kept connections end too, as when a process is killed."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(seen: Recorded | Front, port: int = 0) -> Iterator[StandIn]:
    with StandIn(seen, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.hang_up()
