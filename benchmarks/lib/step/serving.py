"""The server of some arms, and for those that train a drafter the drafter trainer beside it."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from tlt_server.launch import has_gpu

PADDED = "benchmarks.lib.step.padded_trainer"
SETTINGS = Path(__file__).with_name("drafter_trainer.toml")
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
HELD = 65_536
"""Tokens in the server's cache: of 128 responses, few are long at a time."""


class Serving(NamedTuple):
    """A server that answers."""

    server: SideServer
    sides: Mapping[str, Side]
    """How it decodes: by arm of the comparison, and each fixed choice by its own name."""
    steps: Path
    """Its log of steps."""
    trainer: str | None
    """URL of its drafter trainer."""


def kinds(arms: Sequence[str]) -> list[list[str]]:
    """The arms that share a server: a drafter that is trained has one of its own each, so that none begins with what
    another has learnt, and no other server pays for the features that are sent to a trainer."""
    shared = [arm for arm in arms if arm not in (PLAIN, *TRAINED)]
    return [each for each in (shared, *([arm] for arm in arms if arm in (PLAIN, *TRAINED))) if each]


@contextmanager
def serving(
    arms: Sequence[str],
    models: Models,
    sizes: Sequence[int],
    logs: Path,
    *,
    smoke: bool,
    seed: int,
    lends: bool = False,
    shape: str | None = None,
) -> Iterator[Serving]:
    """One of `kinds`. sizes: of batches, ascending. lends: its memory, to the policy while that learns. shape: that the
    models were padded to.

    Raises:
        ServerFailed: a process ended early.
    """
    name = arms[0] if len(arms) == 1 else "arms"
    folder = logs / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    steps = folder / "steps.jsonl"
    sides = _sides(arms, sizes, smoke)
    with ExitStack() as stack:
        flags, trainer = [*logging_steps(steps), *(["--enable-memory-saver"] if lends and has_gpu() else [])], None
        if name != PLAIN:
            flags += ["--watchdog", "observe"]  # a drafter that falls behind is to be measured there
        if name in TRAINED:
            control, trainer = stack.enter_context(_trainer(models, folder, seed, shape, mute=name == MUTED))
            flags += ["--trainer", control]
        site = Site(models.target, models.drafter, folder, sizes, HELD, natural=True)
        side = replace(next(iter(sides.values())), flags=tuple(flags), max_batch=sizes[-1])
        servers = stack.enter_context(side_by_side([side], site))
        yield Serving(stack.enter_context(awake(servers[side.server])), sides, steps, trainer)


def _sides(arms: Sequence[str], sizes: Sequence[int], smoke: bool) -> dict[str, Side]:
    if tuple(arms) == (PLAIN,):
        return {PLAIN: Side(PLAIN)}
    drafts = GPU_ARMS if has_gpu() else CPU_ARMS[1:2] if smoke else CPU_ARMS
    most = {arm: sizes_of(arm, sizes)[-1] if has_gpu() else sizes[-1] for arm in drafts}
    choices = {side.name: side for side in fixed(most, sizes[-1])}
    bandit = {arm: Side(arm, arms=tuple(most), strategy=StrategyUpdate("bandit")) for arm in (FROZEN, ONLINE, MUTED)}
    return {**choices, AGAIN: replace(choices[OFF], name=AGAIN), **bandit}


@contextmanager
def _trainer(models: Models, folder: Path, seed: int, shape: str | None, *, mute: bool) -> Iterator[tuple[str, str]]:
    """Control address and URL. mute: it trains and judges, and finds nothing good enough to publish."""
    gate = f"policy.floor = {1e6 if mute else 1.2}\n"
    config = folder / "train.toml"
    config.write_text(f"entries = {4096 if has_gpu() else 512}\nseed = {seed}\n{gate}" + SETTINGS.read_text())
    with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:  # the path of a socket may not be long
        control, flags = f"ipc://{scratch}/control", ("--target", str(models.target), "--drafter", str(models.drafter))
        drafters, log = Path(scratch) / "drafters", folder / "train.log"
        module = (PADDED, shape, str(models.workload.models)) if shape else ("tlt_server",)
        with training(control, config, drafters, log, *flags, module=module) as status:
            yield control, status.removesuffix("/tlt/v1/train/status")
