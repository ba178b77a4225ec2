"""The server of some arms, and for those that train a drafter the drafter trainer beside it."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import httpx
from tlt_client.schemas import StrategyUpdate

from benchmarks.commands.speed.strategy import ARMS as GPU_ARMS
from benchmarks.commands.speed.strategy import CPU_ARMS
from benchmarks.lib.command import Models
from benchmarks.lib.servers import logging_steps
from benchmarks.lib.sides import Side, SideServer, Site, awake, side_by_side
from benchmarks.lib.step.plan import AGAIN, FROZEN, MUTED, OFF, ONLINE, PLAIN, TRAINED
from benchmarks.lib.strategies import fixed
from benchmarks.lib.training.trainers import training
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu

SETTINGS = Path(__file__).with_name("drafter_trainer.toml")
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
HELD = 131_072
"""Tokens in the server's cache: of 128 responses, few are long at a time."""
POLL_S = 0.05


class Serving(NamedTuple):
    """A server that answers."""

    server: SideServer
    sides: Mapping[str, Side]
    """How it decodes: by arm of the comparison, and each fixed choice by its own name."""
    steps: Path
    """Its log of steps."""
    packs: "Packs | None"
    """Of its drafter trainer."""


class Packs:
    """How many packs a drafter trainer has learnt from, and when: a thread asks every POLL_S, so that no step waits.

    Raises:
        ServerFailed: in `between`, it did not answer.
    """

    def __init__(self, status: str) -> None:
        self._status, self._ended = status, Event()
        self._seen: list[tuple[float, int]] = []
        self._fault: httpx.HTTPError | None = None
        self._thread = Thread(target=self._poll, daemon=True)

    def between(self, begin: float, end: float) -> int:
        """Packs that were seen to be done after `begin`, and not after `end`: monotonic seconds."""
        if self._fault is not None:
            raise ServerFailed(f"the drafter trainer does not answer: {self._fault}") from self._fault
        return self._at(end) - self._at(begin)

    def _at(self, now: float) -> int:
        return next((packs for seen, packs in reversed(self._seen) if seen <= now), 0)

    def _poll(self) -> None:
        with httpx.Client(timeout=60) as http:
            while not self._ended.wait(POLL_S):
                try:
                    packs = int(http.get(self._status).raise_for_status().json()["steps"])
                except httpx.HTTPError as error:  # the network's edge: told to who asks
                    self._fault = error
                    return
                self._seen.append((time.monotonic(), packs))

    def __enter__(self) -> "Packs":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def kinds(arms: Sequence[str]) -> list[list[str]]:
    """The arms that share a server: a drafter that is trained has one of its own each, so that none begins with what
    another has learnt, and no other server pays for the features that are sent to a trainer."""
    shared = [arm for arm in arms if arm not in (PLAIN, *TRAINED)]
    return [each for each in (shared, *([arm] for arm in arms if arm in (PLAIN, *TRAINED))) if each]


@contextmanager
def serving(
    arms: Sequence[str], models: Models, sizes: Sequence[int], logs: Path, *, smoke: bool, seed: int
) -> Iterator[Serving]:
    """One of `kinds`. sizes: of batches, ascending.

    Raises:
        ServerFailed: a process ended early.
    """
    name = arms[0] if len(arms) == 1 else "arms"
    folder = logs / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    steps = folder / "steps.jsonl"
    sides = _sides(arms, sizes, smoke)
    with ExitStack() as stack:
        flags, packs = [*logging_steps(steps)], None
        if name != PLAIN:
            flags += ["--watchdog", "observe"]  # a drafter that falls behind is to be measured there
        if name in TRAINED:
            control, status = stack.enter_context(_trainer(models, folder, seed, mute=name == MUTED))
            flags, packs = [*flags, "--trainer", control], stack.enter_context(Packs(status))
        site = Site(models.target, models.drafter, folder, sizes, HELD, natural=True)
        side = replace(next(iter(sides.values())), flags=tuple(flags), max_batch=sizes[-1])
        servers = stack.enter_context(side_by_side([side], site))
        yield Serving(stack.enter_context(awake(servers[side.server])), sides, steps, packs)


def _sides(arms: Sequence[str], sizes: Sequence[int], smoke: bool) -> dict[str, Side]:
    if tuple(arms) == (PLAIN,):
        return {PLAIN: Side(PLAIN)}
    drafts = GPU_ARMS if has_gpu() else CPU_ARMS[1:2] if smoke else CPU_ARMS
    most = {arm: sizes_of(arm, sizes)[-1] if has_gpu() else sizes[-1] for arm in drafts}
    choices = {side.name: side for side in fixed(most, sizes[-1])}
    bandit = {arm: Side(arm, arms=tuple(most), strategy=StrategyUpdate("bandit")) for arm in (FROZEN, ONLINE, MUTED)}
    return {**choices, AGAIN: replace(choices[OFF], name=AGAIN), **bandit}


@contextmanager
def _trainer(models: Models, folder: Path, seed: int, *, mute: bool) -> Iterator[tuple[str, str]]:
    """Control address and status URL. mute: it trains and judges, and finds nothing good enough to publish."""
    gate = f"policy.floor = {1e6 if mute else 1.2}\n"
    spot = "spot = {on = true, settle_s = 0.05}\n" if has_gpu() else ""
    config = folder / "train.toml"
    config.write_text(f"entries = {4096 if has_gpu() else 512}\nseed = {seed}\n{gate}{spot}" + SETTINGS.read_text())
    with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:  # the path of a socket may not be long
        control, flags = f"ipc://{scratch}/control", ("--target", str(models.target), "--drafter", str(models.drafter))
        drafters, log = Path(scratch) / "drafters", folder / "train.log"
        with training(control, config, drafters, log, *flags) as status:
            yield control, status
