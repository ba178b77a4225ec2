"""A server's /metrics without the server: our counters and our scrape as they are, beside SGLang's metrics that the
dashboards show, filled with numbers. Prints its port, then serves until it is ended.

prometheus_client must find PROMETHEUS_MULTIPROC_DIR in the environment, as in the real server.
"""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tlt_server.api.scrape import ServerCollector
from tlt_server.metrics import ACCEPTED_PER_POSITION, DRAFT_TOKENS, DRAFTS

SCHEDULER = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
TOKENIZER = {"model_name": "m", "engine_type": "unified", "is_streaming": "false"}
ONE_AT_A_TIME = threading.Lock()  # a scrape sees whole steps, so that its ratios are exact
ACCEPTED = (8, 6, 4)  # of ten drafts of three tokens: an accept length of 2.8, an acceptance rate of 0.6


def counting() -> Iterator[None]:
    """Counts one step each time that it is asked."""
    drafts, draft_tokens = (Counter(each.name, each.help) for each in (DRAFTS, DRAFT_TOKENS))
    per_position = Counter(ACCEPTED_PER_POSITION.name, ACCEPTED_PER_POSITION.help, ["position"])
    names = ("num_running_reqs", "num_queue_reqs", "gen_throughput", "token_usage")
    gauges = [Gauge(f"sglang:{name}", name, SCHEDULER, multiprocess_mode="mostrecent") for name in names]
    tokens = Counter("sglang:realtime_tokens_total", "tokens", [*SCHEDULER, "mode"])
    times = ("e2e_request_latency_seconds", "time_to_first_token_seconds")
    seconds = [Histogram(f"sglang:{name}", name, TOKENIZER) for name in times]
    while True:
        drafts.inc(10)
        draft_tokens.inc(30)
        for position, accepted in enumerate(ACCEPTED):
            per_position.labels(position).inc(accepted)
        tokens.labels(**SCHEDULER, mode="decode").inc(28)
        for gauge in gauges:
            gauge.labels(**SCHEDULER).set(0.5)
        for histogram in seconds:
            histogram.labels(**TOKENIZER).observe(0.2)
        yield


def count_forever(steps: Iterator[None]) -> None:
    while True:
        time.sleep(0.05)
        with ONE_AT_A_TIME:
            next(steps)


class Scrape(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        registry = CollectorRegistry()
        ServerCollector(registry)  # type: ignore[no-untyped-call]  # prometheus_client has half its types
        with ONE_AT_A_TIME:
            shown = generate_latest(registry)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.end_headers()
        self.wfile.write(shown)

    def log_message(self, *args: object) -> None:
        """A line for every scrape helps nobody."""


if __name__ == "__main__":
    steps = counting()
    next(steps)  # every series is there from the first scrape
    threading.Thread(target=count_forever, args=[steps], daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scrape)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
