"""What the tests of hot reload share: their servers, and what runs beside an update."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import Tensors, buckets, changed, copied, noisy, shuffled, tensors_of
from tests.link.processes import until
from tlt_server.demo import default_paths, eagle3_path

__all__ = [
    "DRAFTERS",
    "Tensors",
    "Trainer",
    "buckets",
    "changed",
    "copied",
    "noisy",
    "shuffled",
    "tensors_of",
    "until_under_way",
    "while_running",
]

# What the servers of the tests of hot reload draft with at their start: a chain and a tree, EAGLE and EAGLE-3.
DRAFTERS = {"eagle-chain": default_paths()[1], "eagle3-tree": eagle3_path()}


def while_running(work: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """What `work` returns, run in a thread while `meanwhile` runs here."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        meanwhile()
        return result.result()


def until_under_way(trainer: Trainer, requests: int = 1) -> None:
    """Until a step of that many has been taken since this was called; what a server says is as old as its last step."""
    since = time.time()

    def running() -> int:
        loads = trainer.http.get("/v1/loads?include=core").raise_for_status().json()["loads"]
        return sum(load["num_running_reqs"] for load in loads if load["timestamp"] > since)

    until(lambda: running() >= requests, 30)
