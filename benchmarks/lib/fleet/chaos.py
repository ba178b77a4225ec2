"""Rollouts and publications through a fleet whose members, and whose front, are killed and stopped."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.lib.fleet.evidence import Published
from benchmarks.lib.fleet.stand_in import tokens, weights_of, write_checkpoint
from tlt_server.errors import ServerFailed

WORKERS, TOKENS = 8, 12
PATIENCE_S = 60.0
"""That a client tries to get one rollout, and a trainer to publish."""
PAUSE_S = 0.1
REST_S = 0.3
RESTART_S = 90.0
LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclass
class Told:
    """What clients and trainer saw. lost: rollouts that nobody got; wrong: whose tokens are not their weights'."""

    rollouts: int = 0
    lost: int = 0
    wrong: int = 0
    resent: int = 0
    drawn_anew: int = 0
    published: list[Published] = field(default_factory=list)
    ready_again_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Chaos:
    """url: of the front. restart: kills the front and starts another one. join: starts one more member."""

    def __init__(
        self, url: str, folder: Path, restart: Callable[[], Awaitable[None]], join: Callable[[], Awaitable[None]]
    ) -> None:
        self.url, self.told = url, Told()
        self._folder, self._restart, self._join = folder, restart, join
        self._ended = False
        self._weights: dict[str, bytes] = {"default": weights_of(None)}
        self._numbers = itertools.count()
        self._watching: list[asyncio.Task[None]] = []

    async def run(self, publications: int, faults: dict[int, str], least: int) -> Told:
        """least: rollouts. faults: by the number of the publication, as `generate kill`, `front kill`, `join`."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)) as self._http:
            clients = [asyncio.create_task(self._client(number)) for number in range(WORKERS)]
            for number in range(1, publications + 1):
                await self._one(number, faults.get(number))
                await self._rest(REST_S, number * least / publications)
            await asyncio.gather(*self._watching)
            self._ended = True
            await asyncio.gather(*clients)
        return self.told

    async def _rest(self, seconds: float, rollouts: float) -> None:
        """Between two publications, so long that there are as many rollouts."""
        until = time.monotonic() + seconds
        while time.monotonic() < until or self.told.rollouts < rollouts:
            await asyncio.sleep(0.05)

    # -- rollouts --

    async def _client(self, number: int) -> None:
        while not self._ended:
            prompt = [number, next(self._numbers)]
            self.told.rollouts += 1
            if not await self._rollout(prompt, stream=prompt[1] % 2 == 0):
                self.told.lost += 1

    async def _rollout(self, prompt: list[int], *, stream: bool) -> bool:
        """By a client's rules: what was never processed is sent again; what was lost is drawn anew, by another rid."""
        until, rid = time.monotonic() + PATIENCE_S, os.urandom(8).hex()
        while time.monotonic() < until:
            asked = {"input_ids": prompt, "rid": rid, "stream": stream, "sampling_params": {"max_new_tokens": TOKENS}}
            try:
                async with self._http.post(f"{self.url}/generate", data=json.dumps(asked)) as answer:
                    text = await answer.text()
                    self.told.resent += answer.headers.get("X-TLT-Attempt") == "2"
                    if answer.status == 200:
                        return self._whole(prompt, text, stream=stream)
                    if answer.status != 503:
                        raise ConnectionResetError(text)
            except aiohttp.ClientConnectorError:  # nobody listens: nothing was sent
                pass
            except LOST:
                self.told.drawn_anew += 1
                rid = os.urandom(8).hex()
            await asyncio.sleep(PAUSE_S)
        return False

    def _whole(self, prompt: list[int], text: str, *, stream: bool) -> bool:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        last = json.loads(events[-1])
        version = last["meta_info"]["weight_version"]
        right = last["output_ids"] == tokens(self._weights[version], prompt, TOKENS)
        self.told.wrong += not right
        return right and (not stream or text.rstrip().endswith("[DONE]"))

    # -- publications --

    async def _one(self, number: int, fault: str | None) -> None:
        version = f"v{number}"
        folder = write_checkpoint(self._folder / version, number)
        self._weights[version] = weights_of(folder)
        if fault:
            await self._befall(fault)
        began = time.monotonic()
        update = ("/update_weights_from_disk", {"model_path": str(folder), "weight_version": version})
        calls = [update]
        if number % 3 == 0:
            calls = [("/pause_generation", {"mode": "in_place"}), update, ("/continue_generation", {})]
        publishing = asyncio.create_task(self._calls(calls, began))
        if fault == "front kill":
            await asyncio.sleep(random.Random(number).uniform(0.0, 0.02))
            await self._restart()
        await publishing
        self.told.published.append(Published(version, began, time.monotonic()))

    async def _calls(self, calls: list[tuple[str, dict[str, str]]], began: float) -> None:
        """As a trainer: each is repeated until it is answered 200; if the last is refused, all of them are."""
        while time.monotonic() < began + PATIENCE_S:
            for path, body in calls:
                if not await self._called(path, body, began + PATIENCE_S):
                    break
            else:
                return
        raise ServerFailed(f"{calls[0][0]} was not answered 200 within {PATIENCE_S:.0f} s")

    async def _called(self, path: str, body: dict[str, str], until: float) -> bool:
        while time.monotonic() < until:
            with contextlib.suppress(*LOST):
                async with self._http.post(f"{self.url}{path}", data=json.dumps(body)) as answer:
                    if answer.status == 200:
                        return True
                    if path == "/continue_generation":
                        return False
            await asyncio.sleep(PAUSE_S)
        return False

    # -- faults --

    async def _befall(self, fault: str) -> None:
        """Prepares a fault, and watches until as many are ready again as were."""
        before = len(await self._ready())
        self.told.faults.append(fault)
        if fault == "join":
            await self._join()
            before += 1
        elif fault != "front kill":
            at, deed = fault.split()
            victim = (await self._ready())[0]
            async with self._http.post(f"{victim}/faults", data=json.dumps({"at": at, "do": deed})) as answer:
                answer.raise_for_status()
        self._watching.append(asyncio.create_task(self._watch(fault, before)))

    async def _watch(self, fault: str, before: int) -> None:
        """From when one is missing until none is."""
        began, missed = time.monotonic(), fault in ("join", "front kill")
        while time.monotonic() < began + RESTART_S:
            with contextlib.suppress(*LOST):
                ready = len(await self._ready())
                if not missed and ready < before:
                    began, missed = time.monotonic(), True
                elif missed and ready >= before and time.monotonic() > began + 0.2:
                    self.told.ready_again_s.append(time.monotonic() - began)
                    return
            await asyncio.sleep(0.05)
        raise ServerFailed(f"after {fault!r} fewer members are ready than before, for {RESTART_S:.0f} s")

    async def _ready(self) -> list[str]:
        async with self._http.get(f"{self.url}/tlt/v1/fleet") as answer:
            replicas = json.loads(await answer.read())["replicas"]
        return [each["url"] for each in replicas if each["state"] == "ready"]


@contextlib.asynccontextmanager
async def process(
    *command: str, environment: dict[str, str] | None = None, log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child with its output in a file; it is killed in the end."""
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=environment)
    try:
        yield child
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), 20)
        if child.returncode is None:
            child.kill()
            await child.wait()
