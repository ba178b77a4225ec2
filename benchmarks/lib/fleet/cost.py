"""What the front adds to a request and to a chunk of a stream, by turns with the members themselves."""

import asyncio
import itertools
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp

from tlt_server.results import Figures

AT_ONCE = 64
TOKENS = 8
One = Callable[[aiohttp.ClientSession, str, bytes], Awaitable[list[float]]]
TIMEOUT = aiohttp.ClientTimeout(total=60)


async def measured(front: str, members: Sequence[str], rounds: int, seconds: float, pid: int) -> Figures:
    """What 64 requests at once take by way of the front, less what 64 others take meanwhile without it: medians.

    pid: the front's.
    """
    medians: dict[str, list[float]] = defaultdict(list)
    counted, spent = Counter[str](), Counter[str]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT) as http:
        for number in range(rounds + 1):
            for kind, one in (("request", _request), ("chunk", _chunks)):
                before = _cpu_ms(pid)
                took = await _closed_loops(http, one, ([front], members), seconds, stream=kind == "chunk")
                if number:  # the first is to warm up
                    medians[f"added_{kind}"].append(statistics.median(took[0]) - statistics.median(took[1]))
                    medians[f"direct_{kind}"].append(statistics.median(took[1]))
                    counted[kind] += len(took[0])
                    spent[kind] += _cpu_ms(pid) - before
    return {
        "requests_at_once": AT_ONCE,
        "front_added_ms_p50": 1000 * statistics.median(medians["added_request"]),
        "front_added_ms_per_chunk": 1000 * statistics.median(medians["added_chunk"]),
        "front_cpu_ms_per_request": spent["request"] / counted["request"],
        "front_cpu_ms_per_chunk": spent["chunk"] / counted["chunk"],
        "direct_ms_p50": 1000 * statistics.median(medians["direct_request"]),
        "direct_ms_per_chunk": 1000 * statistics.median(medians["direct_chunk"]),
    }


def _cpu_ms(pid: int) -> int:
    """That a process has computed."""
    spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(spent[11]) + int(spent[12])) * 1000 // os.sysconf("SC_CLK_TCK")


async def _request(http: aiohttp.ClientSession, url: str, body: bytes) -> list[float]:
    """Its seconds."""
    began = time.perf_counter()
    async with http.post(url, data=body) as answer:
        await answer.read()
        assert answer.status == 200, await answer.text()
    return [time.perf_counter() - began]


async def _chunks(http: aiohttp.ClientSession, url: str, body: bytes) -> list[float]:
    """Seconds of each chunk, from when its member wrote it."""
    late = []
    async with http.post(url, data=body) as answer:
        async for line in answer.content:
            now = time.monotonic()
            if line.startswith(b"data: {"):
                late.append(now - float(line[line.rindex(b'"sent": ') + 8 :].rstrip(b"}\n")))
    return late


async def _closed_loops(
    http: aiohttp.ClientSession, one: One, sides: Sequence[Sequence[str]], seconds: float, *, stream: bool
) -> list[list[float]]:
    """What `one` gives for each side, all sides at once: they meet the same machine."""
    until, numbers = time.monotonic() + seconds, itertools.count()
    took: list[list[float]] = [[] for _ in sides]

    async def loop(side: int, place: int) -> None:
        await asyncio.sleep(place * 0.01)  # not all at the same moment, as in no run
        urls = sides[side]
        while time.monotonic() < until:
            ids = [next(numbers) * 7919 % 100_000, *range(63)]
            asked = {"input_ids": ids, "stream": stream, "sampling_params": {"max_new_tokens": TOKENS}, "waits": "once"}
            took[side] += await one(http, f"{urls[place % len(urls)]}/generate", json.dumps(asked).encode())

    await asyncio.gather(*(loop(side, place) for side in range(len(sides)) for place in range(AT_ONCE)))
    return took
