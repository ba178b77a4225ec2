"""What a trainer begins with that has no drafter: the one that its servers draft with, fetched over the link.

A trainer that began with another one would find it worse than theirs until it has learnt as much, or publish what they
roll back. Like a drafter that goes the other way it is checked before it counts: chunk by chunk, then names, shapes,
the target that it is for, and that all of it is finite. Where it cannot be trained the log says why, and one is made
that has learnt nothing.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from tlt_server.drafter.folder import write_as_served
from tlt_server.drafter.published import read
from tlt_server.drafter.target import find_target
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config
from tlt_server.trainer.config import TrainConfig
from tlt_server.trainer.host import locked
from tlt_server.trainer.learn.network import network
from tlt_server.trainer.publish.folder import load_drafter
from tlt_server.wire.live import Taken, Taker
from tlt_server.wire.messages import READS_TO_TRAINER, ModelIdentity
from tlt_server.wire.sockets import Link

log = logging.getLogger(__name__)

LOOK_EVERY = 0.05
"""Seconds, until it is asked again whether to go on."""


def start_of(config: TrainConfig) -> Path:
    """Folder of the drafter that training begins with, or began with."""
    return Path(config.drafter) if config.drafter else Path(config.folder) / "start"


def begins_with_servers(config: TrainConfig) -> bool:
    """Whether it has learnt nothing yet, and was told neither what to begin with nor to make one."""
    folder = Path(config.folder)
    learnt = any((folder / each).exists() for each in ("start", "checkpoints", "published"))
    return config.drafter is None and config.drafter_kind is None and not learnt


def begin(config: TrainConfig, is_over: Callable[[], bool]) -> None:
    """Waits for a server, and makes its drafter the one to begin with; where it cannot be trained none, so that one is
    made. ConfigError: a setting that cannot be used. OSError: the disk's."""
    folder = Path(config.folder)
    with locked(folder):
        target, _ = find_target(config.target)
        model = ModelIdentity.of(read_config(target))
        if (taken := _taken(config, model, folder / "fetched", is_over)) is None:
            return
        named = f"drafter {taken.live.version} of {taken.server}"
        try:
            _keep(taken, model, start_of(config))
        except ConfigError as error:
            log.warning("%s is not begun with, but one that has learnt nothing: %s", named, error)
        else:
            log.info("training begins with %s", named)
        shutil.rmtree(folder / "fetched", ignore_errors=True)


def _taken(config: TrainConfig, model: ModelIdentity, folder: Path, is_over: Callable[[], bool]) -> Taken | None:
    """None: it is over before."""
    link = Link(config.listen, READS_TO_TRAINER, curve=config.curve)
    try:
        taker = Taker(link, model, folder)
        while taker.taken is None and not is_over():
            taker.step(LOOK_EVERY)
        return taker.taken
    finally:
        link.close()


def _keep(taken: Taken, model: ModelIdentity, out: Path) -> None:
    """Writes it to a new folder, by the trainer's names. ConfigError: it cannot be trained for this target."""
    if taken.path is None:
        raise ConfigError(taken.live.reason)
    whole = taken.path.parent / "whole"
    shutil.rmtree(whole, ignore_errors=True)  # an earlier life's
    whole.mkdir()
    (whole / "config.json").write_bytes(taken.live.config)
    taken.path.rename(whole / "model.safetensors")
    _check(whole, model)
    write_as_served(read(whole), out)


def _check(folder: Path, model: ModelIdentity) -> None:
    """Sizes first, lest a config that lies about them takes all memory."""
    found = read(folder)
    for name, wanted in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if found.config.get(name) != wanted:
            raise ConfigError(f"its {name} is {found.config.get(name)}, the target's {wanted}")
    tensors = found.tensors()
    try:
        with torch.device("meta"):
            shapes = {name: each.shape for name, each in network(found.config).named_parameters()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"its config.json: {' '.join(str(error).split())}") from error
    if wrong := [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]:
        raise ConfigError(f"{wrong[0]} is not of the shape that its config.json tells of")
    if wrong := [name for name, each in load_drafter(folder).weights().items() if not torch.isfinite(each).all()]:
        raise ConfigError(f"{wrong[0]} holds NaN or infinity")
