"""A small HTTP server on a real socket that answers in SGLang 0.5.17's shapes, and misbehaves when told to.

`acts` are played by the /generate requests in the order in which they come; without one, a request is answered well.
Its "sampling" repeats the prompt's tokens, so that an answer can be told by its question.
"""

import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
Act = Callable[["Handler", Json], None]

STATUS: Json = {
    "version": "0.1.0",
    "sglang_version": "0.5.17+tlt.abc",
    "models": {"target": "t", "drafter": None},
    "speculation": True,
    "arm": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "accept_length": {"recent": 3.1, "total": None},
    "counters": {"drafts": 5, "draft_tokens": 15, "accepted_tokens": 6, "per_position": [3, 2, 1]},
    "uptime_s": 12.5,
    "help": "all well",
    "a field of a later version": 1,
}


EVENT: Json = {
    "number": 3,
    "time": 1.5,
    "kind": "target_published",
    "replica": 0,
    "detail": {"version": 2, "weight_version": None, "torn": False},
}


DRAFTER: Json = {
    "live": {"version": 4, "path": "/d/4", "trained_on": 2, "sha256": "ab"},
    "previous": None,
    "staging": {"version": 5, "ready": False},
    "newest": 4,
    "frozen": False,
}
STRATEGY: Json = {
    "mode": "off",
    "on": False,
    "held": None,
    "arm": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
}


HISTORY = dict.fromkeys(("tokens", "capacity", "bytes", "written", "lookups", "found", "drafted", "accepted"), 7)
LEARNED: Json = {
    "trials": [2.0],
    "hits": [1.0],
    "leads": [],
    "ratios": [],
    "reading": [0.0, 0.0],
}
LOADS: Json = {
    "version": "0.5.17",
    "loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1}, {"num_running_reqs": 2, "num_waiting_reqs": 0}],
}


class StandIn(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *acts: Act) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.acts = deque(acts)
        self.control_acts: dict[str, Act] = {}
        """By path: instead of `control`."""
        self.rids: list[str] = []
        self.bodies: list[Json] = []
        self.versions: list[dict[str, str]] = []
        self.seeds: list[str | None] = []
        self.aborted: list[str] = []
        self.other: list[tuple[str, str, Json, str | None]] = []
        self.changed = threading.Condition()
        self.running = self.most_running = 0
        self.failures: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """False closes the connection with nothing read from it."""
        if self.acts and self.acts[0] is drop_before_reading:
            self.acts.popleft()
            return False
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        import sys

        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError):
            self.failures.append(error)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=10), (self.rids, self.aborted)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn
    rfile: Any

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fields = json.loads(body) if body else {}
        self.runs = self.path == "/generate"
        with self.server.changed:
            if self.path == "/generate":
                self.server.rids.append(fields["rid"])
                self.server.bodies.append(fields)
                ours = {k: v for k, v in self.headers.items() if k.startswith("X-TLT")}
                self.server.seeds.append(ours.pop("X-TLT-Seed", None))
                self.server.versions.append(ours)
                self.server.running += 1
                self.server.most_running = max(self.server.most_running, self.server.running)
                act = self.server.acts.popleft() if self.server.acts else well
            elif self.path == "/abort_request":
                self.server.aborted.append(fields.get("rid", "*"))
                act = control
            else:
                act = self.server.control_acts.get(self.path, control)
            self.server.other.append((self.command, self.path, fields, self.headers["authorization"]))
            self.server.changed.notify_all()
        try:
            act(self, fields)
        finally:
            self.ended()

    do_GET = do_PUT = do_DELETE = do_POST

    def answer(self, status: int, body: Any, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.ended()  # who reads the answer may send the next request before this thread goes on
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def ended(self) -> None:
        with self.server.changed:
            self.server.running -= self.runs
            self.runs = False
            self.server.changed.notify_all()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def event(self, data: Any) -> None:
        payload = f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n".encode()
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")

    def end_events(self) -> None:
        self.ended()
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


# -- what it says ---------------------------------------------------------------------------------------------------


def sampled(fields: Json) -> list[int]:
    return [ord(c) for c in fields["text"]] if "text" in fields else list(fields["input_ids"])


def text_of(tokens: list[int]) -> str:
    return "".join(chr(t) for t in tokens)


def rollout(fields: Json, tokens: list[int], finish: Json | None, **meta: Any) -> Json:
    info: Json = {
        "id": fields["rid"],
        "finish_reason": finish,
        "prompt_tokens": 7,
        "completion_tokens": len(tokens),
        "cached_tokens": 2,
        "weight_version": "default",
        "e2e_latency": 0.1,
        "num_retractions": 0,
    }
    if fields.get("return_logprob"):
        info["output_token_logprobs"] = [[-t / 1000, t, None] for t in tokens]
    return {"text": text_of(tokens), "output_ids": tokens, "meta_info": {**info, **meta}}


STOP = {"type": "stop", "matched": 2}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


# -- acts -----------------------------------------------------------------------------------------------------------


def control(handler: Handler, fields: Json) -> None:
    replies: dict[str, tuple[int, Any]] = {
        "/tlt/v1/status": (200, STATUS),
        "/server_info": (200, {"version": "0.5.17", "tp_size": 2, "max_running_requests": 32}),
        "/metrics": (200, "sglang:num_running_reqs 0.0\n"),
        "/health": (200, ""),
        "/v1/loads?include=core": (200, LOADS),
        "/abort_request": (200, ""),
        "/tlt/v1/events?after=2": (200, [EVENT]),
        "/tlt/v1/drafter": (200, DRAFTER),
        "/tlt/v1/drafter/update": (200, DRAFTER),
        "/tlt/v1/strategy": (200, STRATEGY),
        "/tlt/v1/strategy/learned": (200, LEARNED),
        "/tlt/v1/history": (200, HISTORY),
        "/tlt/v1/history?namespace=a%2Fb": (200, HISTORY),
        "/tlt/v1/drafter/freeze": (200, DRAFTER),
        "/tlt/v1/drafter/watchdog": (200, DRAFTER),
        "/tlt/v1/drafter/rollback": (409, {"detail": "no drafter to go back to"}),
        "/tlt/v1/trainer": (200, {}),
        "/tlt/v1/train/steps": (200, {"steps": 5, "seconds": 0.5, "published": 2, "active": 2}),
        "/tlt/v1/target/share": (200, {"target_version": 3, "path": "/s/1"}),
        "/begin_weight_update": (200, {"success": True, "message": "open"}),
        "/end_weight_update": (400, {"success": False, "message": "no weight update is open"}),
        "/update_weights_from_disk": (200, {"success": True, "message": "done"}),
        "/update_weights_from_tensor": (200, {"success": True, "message": "done"}),
        "/update_weights_from_distributed": (200, {"success": True, "message": "done"}),
        "/init_weights_update_group": (200, {"success": True, "message": "done"}),
        "/destroy_weights_update_group": (200, {"success": True, "message": "done"}),
        "/pause_generation": (200, {"message": "paused", "status": "ok"}),
        "/continue_generation": (200, {"message": "continued", "status": "ok"}),
        "/release_memory_occupation": (409, {"detail": "requests are running"}),
        "/resume_memory_occupation": (200, None),
        "/get_weight_version": (200, {"weight_version": "7"}),
        "/update_weight_version": (200, {"success": True, "new_version": "8"}),
        "/flush_cache?timeout=0.0": (200, "Cache flushed.\n"),
        "/flush_cache?timeout=1.5": (400, "Flush cache failed.\n"),
    }
    handler.answer(*replies.get(handler.path, (404, {"detail": "Not Found"})))


def well(handler: Handler, fields: Json) -> None:
    if fields["stream"]:
        stream_of(fields, incremental=False)(handler, fields)
    else:
        handler.answer(200, rollout(fields, sampled(fields), STOP))


def stream_of(_: Any = None, *, incremental: bool, step: int = 2) -> Act:
    def act(handler: Handler, fields: Json) -> None:
        handler.begin_events()
        for event in events_of(fields, sampled(fields), incremental, step):
            handler.event(event)
        handler.end_events()

    return act


def events_of(fields: Json, tokens: list[int], incremental: bool, step: int) -> Iterator[Json]:
    for start in range(0, max(len(tokens), 1), step):
        finish = STOP if start + step >= len(tokens) else None
        event = rollout(fields, tokens[: start + step], finish)
        if incremental:
            fresh = tokens[start : start + step]
            event |= {"text": text_of(fresh), "output_ids": fresh}
            if "output_token_logprobs" in event["meta_info"]:
                event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][start:]
        yield event


def says(status: int, body: Any, **headers: str) -> Act:
    return lambda handler, fields: handler.answer(status, body, **headers)


def streams(*events: Any) -> Act:
    """Raw events; a callable is given the request."""

    def act(handler: Handler, fields: Json) -> None:
        handler.begin_events()
        for event in events:
            handler.event(event(fields) if callable(event) else event)
        handler.end_events()

    return act


def drop_before_reading(handler: Handler, fields: Json) -> None:
    raise AssertionError("played by StandIn.verify_request")


def drop_after_reading(handler: Handler, fields: Json) -> None:
    handler.hang_up()


def drop_in_the_middle(handler: Handler, fields: Json) -> None:
    if fields["stream"]:
        handler.begin_events()
        handler.event(rollout(fields, sampled(fields)[:1], None))
    else:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"text": "hal')
    handler.hang_up()


def until_aborted(handler: Handler, fields: Json) -> None:
    """Samples until somebody aborts it, or for 10 s; the answer is then what it has."""
    server = handler.server
    server.wait_until(lambda: any(fields["rid"].startswith(rid) or rid == "*" for rid in server.aborted))
    handler.answer(200, rollout(fields, sampled(fields)[:1], ABORT))


def stream_until_hung_up(handler: Handler, fields: Json) -> None:
    """Streams a chunk each 10 ms until the client is gone; then notes it as aborted, as SGLang does."""
    handler.begin_events()
    tokens = [65]
    try:
        while len(tokens) < 1000:
            handler.event(rollout(fields, tokens, None))
            tokens.append(65)
            threading.Event().wait(0.01)
    except OSError:
        with handler.server.changed:
            handler.server.aborted.append(fields["rid"])
            handler.server.changed.notify_all()
        handler.close_connection = True


@contextmanager
def serving(*acts: Act) -> Iterator[StandIn]:
    server = StandIn(*acts)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        assert not server.failures, server.failures
