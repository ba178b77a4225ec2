"""Servers to measure: started side by side where there is a GPU, else one after another, and asked in bulk."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tlt_server.api.status import SpecCounts
from tlt_server.demo.lossless import Tokens
from tlt_server.launch import has_gpu
from tlt_server.process import running_server

# chain and tree before plain, which has to answer questions about what they said
ARMS = {"chain": ["--arm", "3,1,4"], "tree": ["--arm", "5,4,16"], "plain": ["--no-speculation"]}

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
# Servers share one card. Each takes what its tokens need: a share of free memory would depend on the others.
GPU_FLAGS = [
    *("--attention-backend", "flashinfer", "--dtype", "bfloat16", "--mem-fraction-static", "0.6"),
    *("--max-total-tokens", "65536", "--max-running-requests", "256", "--cuda-graph-bs-decode"),
    *map(str, GRAPH_SIZES),
]
GRAPHS = {
    "decode": "Capture target decode CUDA graph end",
    "verify": "captured verification",
    "draft": "captured drafting",
    "draft_extend": "captured draft-extend",
}

KEPT = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=2.0)
"""As many at once as are asked for. A server closes a connection that was idle for 5 s, and one that is used again at
that moment loses the request: so an idle one is kept for less."""

ABORT_EVERY = 0.1
"""Seconds: an abort may overtake the request that it is for, and is said again."""
Serving = Callable[[Sequence[str], Path], AbstractContextManager[str]]
"""As `running_server`: from flags and a log to a URL."""
Request = tuple[Tokens, Mapping[str, Any]]
"""Prompt and sampling parameters."""
Answer = dict[str, Any]
T = TypeVar("T")


@dataclass
class Server:
    """A running server, and what has been asked of it."""

    url: str
    start_seconds: float
    requests: int = 0
    failed: int = 0
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=600, limits=KEPT))

    def ask(
        self, requests: Sequence[Request], *, at_once: int, together: int = 1, **fields: Any
    ) -> list[Answer | None]:
        """Answers in order, None for a failed request.

        Args:
            at_once: requests in flight.
            together: of them, how many travel in one HTTP call; with one, a next request starts as soon as any ends.
            fields: more fields of the /generate call.
        """
        parts = [requests[i : i + together] for i in range(0, len(requests), together)]
        with ThreadPoolExecutor(max(1, at_once // together)) as pool:
            answers = [answer for part in pool.map(lambda part: self._post(part, fields), parts) for answer in part]
        self.requests += len(answers)
        self.failed += answers.count(None)
        return answers

    def keep_busy(self, requests: Sequence[Request], at_once: int, seconds: float) -> None:
        """Always so many in flight, the requests in turn and over again; what runs at the end is aborted."""
        following, ended = cycle(requests), Event()

        def ask(_: int) -> int:
            answered = 0
            while not ended.is_set():
                prompt, params = next(following)
                body = {"input_ids": prompt, "sampling_params": params}
                self.http.post(f"{self.url}/generate", json=body).raise_for_status()
                answered += 1
            return answered

        with ThreadPoolExecutor(at_once) as pool:
            loops = [pool.submit(ask, number) for number in range(at_once)]
            try:
                time.sleep(seconds)
            finally:  # after Ctrl-C too: the loops would go on, and the pool wait for them
                ended.set()
                while wait(loops, ABORT_EVERY).not_done:
                    self.http.post(f"{self.url}/abort_request", json={"abort_all": True}).raise_for_status()
        for loop in loops:
            if error := loop.exception():  # the network's edge, as in `_post`
                logging.warning("a closed loop broke off: %s", error)
                self.failed += 1
            else:
                self.requests += loop.result()

    def _post(self, part: Sequence[Request], fields: Mapping[str, Any]) -> Sequence[Answer | None]:
        prompts, params = zip(*part, strict=True)
        body = {"input_ids": prompts, "sampling_params": params, **fields}
        try:
            answers: list[Answer] = self.http.post(f"{self.url}/generate", json=body).raise_for_status().json()
        except httpx.HTTPError as error:  # the network's edge: counted, shown, and the benchmark goes on
            logging.warning("%d requests failed: %s", len(part), error)
            return [None] * len(part)
        return [None if each["meta_info"]["finish_reason"]["type"] == "abort" else each for each in answers]

    def counts(self) -> SpecCounts:
        """What speculation has done since the server started."""
        scraped = self.http.get(f"{self.url}/metrics").raise_for_status().text
        return SpecCounts.read(text_string_to_metric_families(scraped))


def logging_steps(log: Path) -> list[str]:
    """The flags of a server that logs its steps to this file (engine/steplog.py); their settings lie beside it."""
    config = log.with_suffix(".toml")
    config.write_text(f'step_log = "{log}"\n')
    return ["--tlt-config", str(config)]


@contextmanager
def serving(arm: str, target: Path, drafter: Path, log: Path) -> Iterator[Server]:
    """A server of an arm."""
    flags = ["--model-path", str(target), "--drafter", str(drafter), *ARMS[arm], *(GPU_FLAGS if has_gpu() else [])]
    began = time.monotonic()
    with running_server(flags, log, start_timeout=400) as url:
        yield Server(url, time.monotonic() - began)


def on_each_arm(visit: Callable[[str, Mapping[str, "Future[T]"]], T]) -> dict[str, T]:
    """What `visit(arm, others)` gives for each arm, all at once where there is a GPU.

    `others` holds the arms before it: a visit may wait for their results.
    """
    visits: dict[str, Future[T]] = {}
    with ThreadPoolExecutor(len(ARMS) if has_gpu() else 1) as pool:
        for arm in ARMS:
            visits[arm] = pool.submit(visit, arm, dict(visits))
    return {arm: done.result() for arm, done in visits.items()}


def graph_figures(arm: str, log: Path) -> dict[str, int]:
    """Which CUDA graphs a server has captured, and how many of the decode batches that it logged ran without."""
    text = log.read_text(errors="replace")
    captured = {f"graph_{name}_{arm}": int(line in text) for name, line in GRAPHS.items()}
    logged = [line for line in text.splitlines() if "Decode batch" in line]
    without = sum("cuda graph: True" not in line for line in logged)
    return captured | {f"logged_batches_{arm}": len(logged), f"logged_batches_without_graph_{arm}": without}


def tokens_of(answer: Answer) -> Tokens:
    return tuple(answer["output_ids"])
