"""The front, its members, progress, and the end of all of it by Ctrl-C."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tlt_server.errors import ConfigError
from tlt_server.fleet.front import ALONE, Beside, Front
from tlt_server.fleet.links import Limits
from tlt_server.fleet.members import Event, Fleet, State
from tlt_server.keys import Keys
from tlt_server.preflight import check_place

Say = Callable[[str], None]
TURN_S = 0.2
USUAL = Limits()


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    replicas: servers to start by Ray, with the flags `serve`; address: of a Ray cluster, None: one of this machine.
    gpus: of each; None: its ranks', where the cluster has any. members: URLs of servers that others run. state: the
    folder of the log; None: one that is made. beside: what stands beside the front. module: Python's, with its words
    before the flags, that a replica runs.
    """

    replicas: int
    address: str | None
    gpus: float | None
    serve: Sequence[str]
    members: Sequence[str]
    host: str
    port: int
    min_ready: int
    state: Path | None
    insecure: bool
    beside: Beside = ALONE
    limits: Limits = USUAL
    module: tuple[str, ...] = ("tlt_server", "serve")

    def check(self, keys: Keys) -> None:
        """Raises ConfigError: what cannot be started, before anything is."""
        if not self.replicas and not self.members:
            raise ConfigError("a fleet has members: give --replicas, or --member for each server that runs already")
        if self.serve and not self.replicas:
            raise ConfigError(f"{self.serve[0]}: a flag of `tlt-server serve`, and there is no --replicas to start")
        beside = [(f"--{name}", url) for name, url in self.beside._asdict().items() if url is not None]
        for flag, url in [("--member", url) for url in self.members] + beside:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{flag} {url}: must begin with http:// or https://")
        check_place(self.host, self.port, keyed=bool(keys.api), insecure=self.insecure)


def run(wanted: Wanted, keys: Keys, say: Say) -> None:
    """Returns when it is told to end. ConfigError, ServerFailed: it cannot start."""
    wanted.check(keys)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(wanted, keys, say))


async def _run(wanted: Wanted, keys: Keys, say: Say) -> None:
    state = wanted.state or Path(tempfile.mkdtemp(prefix="tlt-fleet-"))
    front, ended = Front(state, wanted.min_ready, wanted.limits, keys, wanted.beside), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    named = {f"member-{index}": url.rstrip("/") for index, url in enumerate(wanted.members)}
    await front.start(wanted.host, wanted.port, named)
    say(f"front       http://{wanted.host}:{wanted.port}, its log in {state}")
    told = asyncio.create_task(_tell(front.fleet, say))
    try:
        await _until(ended, wanted, keys, state, say)
    finally:
        told.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await told
        await front.close()


async def _until(ended: asyncio.Event, wanted: Wanted, keys: Keys, state: Path, say: Say) -> None:
    """Has Ray start and keep the replicas, if there are any, until the end."""
    if not wanted.replicas:
        await ended.wait()
        return
    from tlt_server.fleet.start.replicas import Shape, deployed, end

    shape = Shape(
        flags=tuple(wanted.serve), front=f"http://{wanted.host}:{wanted.port}", logs=str(state / "logs"), keys=keys,
        probe_s=wanted.limits.probe, module=wanted.module,
    )  # fmt: skip
    starting = asyncio.ensure_future(
        asyncio.to_thread(deployed, wanted.replicas, wanted.address, wanted.gpus, shape, say)
    )
    ending = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await ending
    finally:
        ending.cancel()
        say("ending the replicas")
        await asyncio.to_thread(end, wanted.address)


async def _tell(fleet: Fleet, say: Say) -> None:
    """Says what happens to members, as it happens."""
    last = 0
    while True:
        for event in [event for event in fleet.events if event.number > last]:
            say(_line(event, fleet))
            last = event.number
        await asyncio.sleep(TURN_S)


def _line(event: Event, fleet: Fleet) -> str:
    here = sum(member.state is not State.RETIRED for member in fleet.members.values())
    ready = f" ({len(fleet.ready())} of {here})" if event.kind == "ready" else ""
    return f"{event.replica or 'fleet':11} {event.kind}{ready}{': ' + event.detail if event.detail else ''}"
