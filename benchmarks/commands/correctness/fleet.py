"""Does a fleet lose, repeat or mix up rollouts, whoever of it is killed? And what does its front cost?

    python -m benchmarks fleet --json fleet.json

Stand-ins for servers, kept by Ray Serve on a cluster of two nodes, sample while 30 publications go through; a member is
killed at every phase of one, another stops, one joins, the front is killed. Counted from what the stand-ins logged.
Needs tlt-server[fleet].
"""

import argparse
import asyncio
import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.markdown import Markdown

from benchmarks.lib.command import out, run
from benchmarks.lib.fleet import cost, evidence, real
from benchmarks.lib.fleet.chaos import Chaos, Told, process
from benchmarks.lib.tables import table
from tlt_server import results
from tlt_server.errors import ConfigError, ServerFailed
from tlt_server.process import free_port
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/fleet",)
REPLICAS = 3
PHASES = ("prepare", "apply", "applied", "verify", "pause", "resume", "generate")
FAULTS = {
    **{2 + 3 * index: f"{phase} kill" for index, phase in enumerate(PHASES[:4])},
    14: "join",
    **{15: "pause kill", 18: "resume kill", 20: "generate kill", 23: "apply stop"},
    26: "front kill",
    28: "front kill",
}
"""By the number of the publication; every third one is between pause and continue."""
SMOKE = {1: "apply kill", 2: "front kill"}
START_S = 90.0


class Place:
    """A Ray cluster of two nodes, the front, and where they write."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder, self.logs, self.port = folder, folder / "logs", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack, self._address = stack, ""
        self._front: Any = None
        self.logs.mkdir()

    def cluster(self) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is gone in minutes, and on loopback
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        self._stack.callback(made.shutdown)
        made.add_node(num_cpus=2)
        self._address = made.address

    async def front(self) -> None:
        """Starts it; returns when all its members are ready."""
        command = (
            *(sys.executable, "-m", "benchmarks.lib.fleet.front", "--replicas", str(REPLICAS)),
            *("--address", self._address, "--port", str(self.port), "--state", str(self.folder / "state")),
            *("--logs", str(self.logs), "--token-ms", "10"),
        )
        self._front = await self._stack.enter_async_context(process(*command, log=self.folder / "front.log"))
        await self._until(REPLICAS)

    async def _until(self, count: int) -> None:
        for _ in range(int(START_S / 0.2)):
            if self._front.returncode is not None:
                break
            try:
                async with httpx.AsyncClient() as client:
                    told = (await client.get(f"{self.url}/tlt/v1/fleet")).json()
                if sum(each["state"] == "ready" for each in told["replicas"]) >= count:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        said = (self.folder / "front.log").read_text(errors="replace")[-1000:]
        raise ServerFailed(f"the front has not {count} members ready within {START_S:.0f} s:\n{said}")

    async def restart(self) -> None:
        self._front.kill()
        await self._front.wait()
        await self.front()

    async def join(self) -> None:
        """One that Ray knows nothing of."""
        port = free_port()
        command = (sys.executable, "-m", "benchmarks.lib.fleet.stand_in", "--port", str(port), "--token-ms", "10")
        log = self.folder / "joiner.log"
        await self._stack.enter_async_context(process(*command, "--log", str(self.logs), log=log))
        async with httpx.AsyncClient() as client:
            member = {"name": "joiner", "url": f"http://127.0.0.1:{port}"}
            (await client.post(f"{self.url}/tlt/v1/fleet/members", json=member)).raise_for_status()


async def measure(folder: Path, *, smoke: bool) -> Figures:
    async with AsyncExitStack() as stack:
        place = Place(folder, stack)
        place.cluster()
        await place.front()
        chaos = Chaos(place.url, folder / "policies", place.restart, place.join)
        told = await chaos.run(2 if smoke else 30, SMOKE if smoke else FAULTS, 50 if smoke else 1500)
    return counted(told, evidence.read(place.logs))


def counted(told: Told, lines: list[evidence.Line]) -> Figures:
    """The figures, of what clients saw and members logged."""
    begins = evidence.begins(lines)
    return {
        "rollouts": told.rollouts,
        "rollouts_lost": told.lost,
        "sampled_twice": evidence.sampled_twice(begins, evidence.gone(lines)),
        "stale_served": evidence.stale_served(begins, told.published),
        "torn_fleet": evidence.torn(begins, told.published),
        "wrong_tokens": told.wrong,
        "publications": len(told.published),
        "faults": len(told.faults),
        "members_killed": len(evidence.gone(lines)),
        "begun": len(begins),
        "sent_again": told.resent,
        "drawn_anew": told.drawn_anew,
        "publication_s_p50": statistics.median(each.ended - each.began for each in told.published),
        "ready_again_s": max(told.ready_again_s),
        "ready_again_s_p50": statistics.median(told.ready_again_s),
    }


async def priced(folder: Path, *, smoke: bool) -> Figures:
    """What the front costs, over two stand-ins."""
    async with AsyncExitStack() as stack:
        urls = []
        for name in ("a", "b"):
            port = free_port()
            command = (sys.executable, "-m", "benchmarks.lib.fleet.stand_in", "--port", str(port), "--token-ms", "80")
            log = folder / f"{name}.log"
            await stack.enter_async_context(process(*command, "--log", str(folder / f"{name}.jsonl"), log=log))
            urls.append(f"http://127.0.0.1:{port}")
        place = Place(folder, stack)
        command = (sys.executable, "-m", "benchmarks.lib.fleet.front", "--port", str(place.port))
        members = [word for url in urls for word in ("--member", url)]
        state = ("--state", str(folder / "state"))
        started = process(*command, *members, *state, log=folder / "front.log")
        place._front = await stack.enter_async_context(started)
        await place._until(2)
        return await cost.measured(place.url, urls, 1 if smoke else 8, 1.0 if smoke else 2.0, place._front.pid)


def shown(result: Result) -> str:
    rows = [
        [name, f"{value:.3g}" if isinstance(value, float) else str(value)] for name, value in result.figures.items()
    ]
    return table(["figure", "value"], rows)


def main(argv: Sequence[str]) -> None:
    flags = argparse.ArgumentParser(prog="python -m benchmarks fleet", description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    flags.add_argument("--smoke", action="store_true", help="as little as proves that it runs")
    flags.add_argument("--real-only", action="store_true", help="two real servers instead, on a CPU: shorter, no Ray")
    flags.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps the logs")
    arguments = flags.parse_args(argv)

    def measured() -> Result:
        if arguments.real_only:
            with tempfile.TemporaryDirectory(prefix="tlt-fleet-") as scratch:
                return _told(real.measure(Path(scratch)))
        if importlib.util.find_spec("ray") is None or importlib.util.find_spec("grpc") is None:
            raise ConfigError("fleet: Ray Serve is not installed: pip install tlt-server[fleet]")
        with tempfile.TemporaryDirectory(prefix="tlt-fleet-", ignore_cleanup_errors=True) as scratch:
            top = arguments.keep or Path(scratch)
            for part in ("cost", "chaos"):
                (top / part).mkdir(parents=True)
            figures = asyncio.run(priced(top / "cost", smoke=arguments.smoke))
            figures |= asyncio.run(measure(top / "chaos", smoke=arguments.smoke))
        return _told(figures)

    def _told(figures: Figures) -> Result:
        made = results.measured_here("fleet", [*flags.prog.split(), *argv], figures)
        out.print(Markdown(shown(made)))
        return made

    run("fleet", arguments, measured)
