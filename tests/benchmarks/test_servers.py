"""How benchmarks ask servers."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.lib.servers import Request, Server

QUESTION: Request = ((1,), {})


class Half:
    """A stand-in that answers one request in two at once, and the others when they are aborted."""

    def __init__(self) -> None:
        aborted, lock = threading.Event(), threading.Lock()
        self.asked, self.most = list[int](), 0
        half, running = self, 0

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                nonlocal running
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    aborted.set()
                else:
                    with lock:
                        half.asked.append(body["input_ids"][0])
                        running += 1
                        half.most = max(half.most, running)
                        waits = len(half.asked) % 2
                    if waits:
                        aborted.wait()
                    with lock:
                        running -= 1
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()
        self.server = Server(f"http://127.0.0.1:{self._listener.server_port}", 0.0)

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self.server.http.close()


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half()
    yield made
    made.close()


QUESTIONS: list[Request] = [((number,), {}) for number in range(8)]


@pytest.mark.slow
def test_a_closed_loop_keeps_so_many_in_flight_and_aborts_the_rest(half: Half) -> None:
    half.server.keep_busy(QUESTIONS, at_once=3, seconds=0.2)
    assert half.most == 3
    assert {half.asked.count(number) for number in range(8)} <= {len(half.asked) // 8, len(half.asked) // 8 + 1}
    assert (half.server.requests, half.server.failed) == (len(half.asked), 0)


@pytest.mark.slow
def test_a_closed_loop_ends_by_ctrl_c(half: Half) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        half.server.keep_busy(QUESTIONS, at_once=3, seconds=60)
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_connection_that_the_server_may_be_closing_is_not_used_again() -> None:
    """Idle for 3 s of the 5 after which servers close; before, a request in 700 failed where batches took 5 s."""
    callers = []

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            callers.append(self.client_address)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listener.server_port}", 0.0)
        for pause in (0.0, 3.0):
            time.sleep(pause)
            server.ask([QUESTION], at_once=1)
        listener.shutdown()
        server.http.close()
    assert len(callers) == 2
    assert callers[0] != callers[1]
