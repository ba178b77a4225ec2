"""What a swap costs in accept length because the drafter's keys and values in the cache are the old drafter's.

Two places hold them: requests that were running at the swap, and prefixes in the radix cache, which new requests share.
The same greedy tokens are drafted by the same drafter once over keys and values of the old one, and once over its own:
what differs is what the old ones cost.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.reload.pushing import Events, Push
from benchmarks.lib.reload.steps import accept_length, starts_of
from benchmarks.lib.reload.streams import Streams
from tlt_server.engine.decode.steplog import SettledStep
from tlt_server.errors import ServerFailed
from tlt_server.results import Figures

PREFIX = 128
"""Tokens of a response that the prefixes in the cache hold beside the prompt."""


@dataclass(frozen=True)
class Compared:
    """The same requests over the old drafter's cache and over the new one's own.

    starts: from which token of each request on they are compared, by request.
    """

    stale: Sequence[SettledStep]
    fresh: Sequence[SettledStep]
    starts: Mapping[str, int]

    def lengths(self, tokens: int) -> tuple[float, float]:
        """Accept lengths in the first `tokens` after the start, stale and fresh."""
        return accept_length(self.stale, self.starts, tokens), accept_length(self.fresh, self.starts, tokens)


@dataclass(frozen=True)
class Cache:
    """Measures it on a running server.

    streams: of at least twice as many tokens as are looked at after a swap, so that a swap falls early enough.
    """

    streams: Streams
    push: Push
    events: Events

    def running(self, old: Path, new: Path, share: float) -> Compared:
        """Requests that ran while the drafter was swapped, when about this share of the first half was sampled."""
        self.push(self.events, old)
        self._flush()
        half = self.streams.tokens // 2
        began = time.monotonic()
        self.streams.round(tokens=half)
        pause = share * (time.monotonic() - began)
        self._flush()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.streams.round)
            time.sleep(pause)
            version = self.push(self.events, new).version
            stale = self.streams.steps_of(running.result())
        self._flush()
        fresh = self.streams.steps_of(self.streams.round())
        starts = starts_of(stale, version)
        if not starts:
            raise ServerFailed(f"{new} was in force only when all requests had ended: they are too short")
        return Compared(stale, fresh, starts)

    def prefix(self, old: Path, new: Path, tokens: int) -> Compared:
        """Requests whose prompts the old drafter has read, and the same ones after the cache was emptied."""
        self.push(self.events, old)
        self._flush()
        begun = self.streams.round(tokens=PREFIX)
        prompts = [(*prompt, *output) for prompt, output in zip(self.streams.prompts, begun.outputs, strict=True)]
        self.push(self.events, new)
        stale = self.streams.steps_of(self.streams.round(prompts, tokens))
        self._flush()
        fresh = self.streams.steps_of(self.streams.round(prompts, tokens))
        return Compared(stale, fresh, {str(i): 0 for i in range(len(prompts))})

    def _flush(self) -> None:
        server = self.streams.server
        server.http.post(f"{server.url}/flush_cache", params={"timeout": 10}).raise_for_status()


def cache_figures(cache: Cache, pairs: Mapping[str, tuple[Path, Path]], after: Sequence[int], repeats: int) -> Figures:
    """Accept lengths after a swap, and what the old drafter's cache takes of them in percent.

    Args:
        pairs: the old drafter and the new one, by the name of what the old one was.
        after: in how many first tokens.
        repeats: of each; the swaps of running requests fall at other tokens each time.
    """
    figures: Figures = {}
    for name, (old, new) in pairs.items():
        found = {
            "running": [cache.running(old, new, part / repeats) for part in range(repeats)],
            "prefix": [cache.prefix(old, new, max(after)) for _ in range(repeats)],
        }
        for where, compared in found.items():
            for tokens in after:
                lengths = [each.lengths(tokens) for each in compared]
                stale, fresh = (sum(each[i] for each in lengths) / len(lengths) for i in range(2))
                case = f"{where}_{name}_first_{tokens}"
                figures |= {f"accept_length_{case}": stale, f"accept_length_{case}_fresh": fresh}
                figures[f"cache_cost_percent_{case}"] = 100 * (1 - stale / fresh)
    return figures
