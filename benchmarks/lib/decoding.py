"""How fast a server decodes a constant batch: read off the lines that SGLang logs every few decode steps.

The lines are upstream's own measure, the same for every peer, and cost nothing. A line counts if every request ran in
it. The first one after the prefill spans the prefill too, the last one how requests end: both are left out.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.lib.servers import Request
from benchmarks.lib.sides import SideServer
from tlt_server.demo.lossless import Tokens

_LINE = re.compile(
    r"Decode batch.*?#running-req: (\d+), #token: (\d+),.*?(?:accept len: ([\d.]+),.*?)?graph: (\w+),"
    r".*?gen throughput \(token/s\): ([\d.]+)"
)


class Window(NamedTuple):
    """A few decode steps of a batch.

    cached: tokens in the KV cache, of all requests.
    accept_length: mean tokens per request and step, in them; 1 without speculation.
    graph: whether the target's pass was a CUDA graph.
    """

    batch: int
    cached: int
    tokens_per_s: float
    accept_length: float
    graph: bool

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step."""
        return 1000 * self.batch * self.accept_length / self.tokens_per_s


@dataclass(frozen=True)
class Load:
    """What each side is asked at temperature 1: all prompts at once, `tokens` tokens each, past every end.

    waves: how often, one after another: what a few requests sample decides much.
    closed: so many requests in flight instead, each to its natural end, for so many seconds.
    """

    name: str
    prompts: Sequence[Tokens]
    tokens: int
    waves: int = 1
    closed: tuple[int, float] | None = None

    @property
    def batch(self) -> int:
        return self.closed[0] if self.closed else len(self.prompts)

    @property
    def warm_up(self) -> "Load":
        """As little as has kernels compiled and prompts prefilled."""
        return replace(self, prompts=self.prompts[: self.batch], tokens=24, waves=1, closed=None)

    def requests(self, wave: int = 0) -> list[Request]:
        """Each has a seed of its own, so that all sides that honour one decode the same responses."""
        params = {"temperature": 1.0, "max_new_tokens": self.tokens, "ignore_eos": not self.closed}
        seeds = range(wave * len(self.prompts), (wave + 1) * len(self.prompts))
        return [(prompt, {**params, "sampling_seed": seed}) for prompt, seed in zip(self.prompts, seeds, strict=True)]


def windows(log: str) -> list[Window]:
    """Every window in a server's log."""
    found = []
    for line in log.splitlines():
        if match := _LINE.search(line):
            batch, cached, accept_length, graph, rate = match.groups()
            found.append(Window(int(batch), int(cached), float(rate), float(accept_length or 1), graph == "True"))
    return found


def steady(found: Sequence[Window], batch: int) -> list[Window]:
    """Those in which all `batch` requests decode, and nothing else happens."""
    return [window for window in found if window.batch == batch][1:-1]


def decode(server: SideServer, load: Load) -> list[Window]:
    """The steady windows of one load; empty if it was too short, or a request failed.

    A prompt that the server has seen lies in its cache, so that a second time all requests start at once. In a closed
    loop those in which new ones are prefilled count too.
    """
    found = list[Window]()
    if load.closed:
        before = server.log.stat().st_size
        server.keep_busy(load.requests(), *load.closed)
        return windows(logged(server, before))[1:-1]
    for wave in range(load.waves):
        before = server.log.stat().st_size
        server.ask(load.requests(wave), at_once=load.batch, together=load.batch)
        time.sleep(0.05)  # the last line may come after the answer
        found += steady(windows(logged(server, before)), load.batch)
    return found


def logged(server: SideServer, since: int) -> str:
    """What a server has logged after its log's first `since` bytes."""
    with server.log.open("rb") as log:
        log.seek(since)
        return log.read().decode(errors="replace")
