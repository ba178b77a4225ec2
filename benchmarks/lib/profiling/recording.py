"""Records decode steps of running servers: one trace for each side and batch size, and what the trace does not tell.

A folder of recordings holds `SIDE-BATCH.json.gz` for each, the servers' logs, and `recordings.json`, written last.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from benchmarks.lib.decoding import Load, Window, logged, windows
from benchmarks.lib.sides import Side, SideServer, Site, awake, side_by_side
from benchmarks.lib.strategies import Strategies
from tlt_server.config import Arm
from tlt_server.errors import ConfigError, ServerFailed
from tlt_server.preflight import read_config
from tlt_server.results import Result, measured_here
from tlt_server.strategy.settings import from_client

NEW_TOKENS = 1024  # of each request: more than the steps below need
UNDISTURBED = 10  # lines of the server's log before a trace is taken
STEPS = 8  # in a trace
T = TypeVar("T")


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recording.

    arm: None for plain decoding.
    context: tokens of a request in the KV cache when the trace was taken.
    accept_length: tokens that a request gained by a step.
    step_ms: a step's time before the trace was taken, by the server's log: the recorder slows the CPU.
    """

    side: str
    arm: Arm | None
    batch: int
    context: float
    accept_length: float
    step_ms: float

    @property
    def suffix(self) -> str:
        """Of the names of its figures."""
        return f"{self.side}_batch_{self.batch}"

    def trace(self, folder: Path) -> Path:
        return folder / f"{self.side}-{self.batch}.json.gz"


class Recordings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a folder of recordings holds. made: where and how, without figures. target, drafter: their config.json."""

    made: Result
    target: dict[str, Any]
    drafter: dict[str, Any]
    runs: list[Run]


def load(folder: Path) -> Recordings:
    """Raises ConfigError where the folder is not one of recordings, or one that was not finished."""
    path = folder / "recordings.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recordings)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no finished recordings ({error}); record them with --traces {folder}") from error


def record(sides: Sequence[Side], site: Site, loads: Sequence[Load], folder: Path) -> Recordings:
    """Serves the sides, and records a step of each under each load.

    Args:
        sides: plain decoding, and arms of ours, each by a server of its own or by a strategy that is one arm or off.
        folder: of the recordings.

    Raises:
        ConfigError: the servers would not fit into memory.
        ServerFailed: a server ended, or gave no trace.
    """
    made = measured_here("profile", [], {})
    runs, strategies = [], Strategies()
    with side_by_side(sides, site) as servers:
        for side in sides:
            with awake(servers[side.server]) as server, strategies.active(server, side):
                for load in loads:
                    arm = arm_of(side)
                    run = Run(side=side.name, arm=arm, batch=load.batch, context=0, accept_length=1, step_ms=0)
                    runs.append(record_run(run, server, load, folder))
    configs = {"target": dict(read_config(site.target)), "drafter": dict(read_config(site.drafter))}
    recordings = Recordings(made=made, **configs, runs=runs)
    partial = folder / ".recordings.json.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(recordings), indent=2))
    partial.replace(folder / "recordings.json")
    return recordings


def arm_of(side: Side) -> Arm | None:
    """What a side decodes with; None: plainly."""
    pinned = side.strategy and side.strategy.pinned
    return from_client(pinned) if pinned else side.arm


def record_run(run: Run, server: SideServer, load: Load, folder: Path) -> Run:
    """Sends the load to a server; takes a trace once enough steps went by undisturbed.

    Args:
        run: what is known beforehand.

    Returns:
        the run with what was found.

    Raises:
        ServerFailed: the server refused or ended, or gave no trace.
    """
    before = server.log.stat().st_size

    def lines() -> list[Window]:
        return [window for window in windows(logged(server, before)) if window.batch == load.batch]

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.ask, load.requests(), at_once=load.batch, together=load.batch)
        found = _wait(lines, lambda found: len(found) >= UNDISTURBED, answers)
        try:
            _take_trace(server, run.trace(folder), answers)
        except httpx.HTTPError as error:
            raise ServerFailed(f"{run.suffix}: {error}; the server's log, {server.log}, may say why") from error
    steady = found[-5:]  # the first ones count the prefill's time, and a step's time grows with the context
    return msgspec.structs.replace(
        run,
        context=steady[-1].cached / run.batch,
        accept_length=statistics.median(window.accept_length for window in steady),
        step_ms=statistics.median(window.step_ms for window in steady),
    )


def _take_trace(server: SideServer, path: Path, answers: Future[Any]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wanted = {"output_dir": scratch, "num_steps": STEPS, "activities": ["CPU", "GPU"], "record_shapes": False}
        server.http.post(f"{server.url}/start_profile", json=wanted).raise_for_status()
        done = f"Profiling done. Traces are saved to: {scratch}"
        _wait(lambda: done in server.log.read_text(errors="replace"), bool, answers)
        (trace,) = Path(scratch).glob("*.json.gz")
        trace.replace(path)


def _wait(look: Callable[[], T], enough: Callable[[T], bool], answers: Future[Any]) -> T:
    """What `look` gives, once it is enough."""
    while not enough(found := look()):
        if answers.done():
            raise ServerFailed(f"all {NEW_TOKENS} tokens were generated before the trace was taken")
        time.sleep(0.02)
    return found
