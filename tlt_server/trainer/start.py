"""From settings to a running trainer: everything is checked before anything is trained."""

import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tlt_server.config import DrafterKind
from tlt_server.drafter.folder import create
from tlt_server.drafter.header import MOST_HEADER
from tlt_server.drafter.networks import Eagle3
from tlt_server.drafter.target import find_target
from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.preflight import read_config
from tlt_server.trainer.begin import begin, begins_with_servers, start_of
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.config import TrainConfig
from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.inbox import Inbox
from tlt_server.trainer.host import ended_by_signals, locked
from tlt_server.trainer.learn.demands import Demands
from tlt_server.trainer.learn.helper import assist
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.losses import EAGLE, EAGLE3, HASS, Objective
from tlt_server.trainer.learn.memory import limit, needed
from tlt_server.trainer.learn.network import NETWORKS
from tlt_server.trainer.learn.packing import Run, pack
from tlt_server.trainer.learn.ranks import Place, joined
from tlt_server.trainer.learn.team import Team
from tlt_server.trainer.logbooks import kept
from tlt_server.trainer.progress import in_terminal
from tlt_server.trainer.publish.folder import Drafter, load_drafter, load_frozen
from tlt_server.trainer.publish.judge import Judge
from tlt_server.trainer.publish.published import Published
from tlt_server.trainer.publish.publisher import Publisher
from tlt_server.trainer.servers import Servers
from tlt_server.trainer.service import Parts, Service
from tlt_server.trainer.status import Status, shown
from tlt_server.trainer.workers import Workers
from tlt_server.wire.messages import READS_TO_TRAINER, Hello, ModelIdentity
from tlt_server.wire.sharing import Fetcher
from tlt_server.wire.sockets import Inlet, Link
from tlt_server.wire.trainer import Sender

log = logging.getLogger(__name__)

OBJECTIVES = {"eagle": EAGLE, "hass": HASS, "eagle3": EAGLE3}
OF_KIND = {DrafterKind.EAGLE: "hass", DrafterKind.EAGLE3: "eagle3"}
"""Which of them a kind learns by, unless it is said: what is best in docs/results/learning.md."""


def train(config: TrainConfig) -> None:
    """Runs a trainer, or its part under torchrun, until SIGINT or SIGTERM.

    Raises ConfigError: a setting that cannot be used, or a folder that is damaged or another trainer's.
    Raises DiskFailed: what was learnt last could not be written.
    Raises RankLost: another process of this trainer is gone.
    """
    over = threading.Event()
    ended_by_signals(over)  # a helper ends when its leader, which is told too, says so
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes two; shells allow 1024 files
    torch.set_num_threads(config.threads or max(1, torch.get_num_threads() - 1))
    try:
        with joined(config.device) as place:
            if place.rank == 0:
                _lead(config, place, over)
            else:
                limit(config.memory_gb, place.device)
                assist(place.lines[0], lambda drafter: objective_of(config, drafter))
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{reason} Lower entries, {config.entries}, or raise memory_gb if it is given") from error
    except OSError as error:
        where = error.filename or config.folder
        raise DiskFailed(
            f"{where}: {error.strerror or error}. Make room, or name another folder by --folder"
        ) from error


def _lead(config: TrainConfig, place: Place, over: threading.Event) -> None:
    service: Service | None = None
    demands = Demands() if config.on_demand else None

    def read() -> Status:
        return service.status if service else Status()

    with ExitStack() as stack:
        if begins_with_servers(config):  # else nothing is shown before it is known how far training is
            url = _shown(config, stack, read, demands)
            log.info("the trainer waits at %s for a server, whose drafter it begins with; %s", config.listen, url)
            begin(config, over.is_set)
        else:
            url = ""
        parts = stack.enter_context(prepared(config, place))
        thread = stack.enter_context(ThreadPoolExecutor(1, "control"))
        sending = thread.submit(parts.sender.run, parts.workers.tick)
        try:
            service = Service(parts, lambda: over.is_set() or sending.done(), demands)
            if (config.spot.on or config.on_demand) and place.device.type == "cuda":
                _rehearse(parts)
            with ExitStack() as showing:
                url = url or _shown(config, showing, read, demands)
                log.info("the trainer listens at %s, for features at %s; %s", config.listen, parts.inlet.address, url)
                service.run()
        finally:
            parts.sender.stop()
        sending.result()


def _shown(config: TrainConfig, stack: ExitStack, read: Callable[[], Status], demands: Demands | None) -> str:
    """Shows and logs the status, and takes demands, until the stack unwinds; the URL."""
    url = stack.enter_context(shown(config.host, config.port, read, demands))
    stack.enter_context(in_terminal(read))
    stack.enter_context(kept(config.logbooks, Path(config.folder), read))
    return url


class Learning(NamedTuple):
    """What learns, and what from, without any link. drafter: in training; start: what it began as."""

    target: Path
    drafter: Drafter
    start: Drafter
    trainer: Trainer
    buffer: Buffer


def learning(config: TrainConfig, device: torch.device) -> Learning:
    """Made by the settings, on a device. ConfigError: a setting that cannot be used."""
    target, drafter, start = _models(config)
    trainer, (width, _) = _trainer(config, target, drafter, device), _reads(drafter)
    hidden = int(drafter.config["hidden_size"])
    buffer = Buffer(
        width,
        hidden,
        config.buffer_mb << 20,
        config.entries,
        config.max_age,
        config.held_out,
        config.policy.requests,
    )
    return Learning(target, drafter, start, trainer, buffer)


@contextmanager
def prepared(config: TrainConfig, place: Place) -> Iterator[Parts]:
    """All parts of a service; what they hold is released at the end. ConfigError: a setting that cannot be used."""
    folder = Path(config.folder)
    with ExitStack() as stack:
        stack.enter_context(locked(folder))
        target, drafter, start, trainer, buffer = learning(config, place.device)
        published = Published(folder)
        published.clear_away()
        trainer.team = Team(place.lines, drafter.config)
        stack.callback(trainer.team.end)
        checkpoints = stack.enter_context(closing(Checkpoints(folder / "checkpoints", config.keep)))
        _resume(trainer, checkpoints)
        inlet = stack.enter_context(closing(Inlet(config.features_address, config.curve)))
        model, servers = ModelIdentity.of(read_config(target)), Servers()
        fetcher = Fetcher(folder / "shared", _most_shared(model), servers.take)
        link = Link(config.listen, READS_TO_TRAINER, curve=config.curve)
        workers = Workers(place.devices, config.spot, lambda rank: _end_overdue(rank, config))
        width, kind = _reads(drafter)

        def hear(peer: str, hello: Hello) -> None:
            workers.hear(peer, hello)
            servers.hear(peer, hello)

        sender = Sender(link, model, hear, fetcher=fetcher, fan_out=config.fan_out, paced=workers.paced)
        yield Parts(
            config=config,
            device=place.device,
            drafter=drafter,
            trainer=trainer,
            buffer=buffer,
            judge=Judge(config.gate, config.entries, start.network, published, place.device),
            checkpoints=checkpoints,
            publisher=Publisher(published, sender),
            servers=servers,
            workers=workers,
            inlet=inlet,
            inbox=Inbox(inlet, model, kind, width, servers.targets),
            fetcher=fetcher,
            sender=sender,
        )


def _most_shared(model: ModelIdentity) -> int:
    """Bytes of a file with a target's embedding, or its head, in float32 at most."""
    return 4 * model.vocab_size * model.hidden_size + MOST_HEADER


def _resume(trainer: Trainer, checkpoints: Checkpoints) -> None:
    if (saved := checkpoints.newest()) is not None:
        try:
            trainer.restore(*saved)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"checkpoint: damaged ({error!r}). Remove the newest to resume from an older") from error
        log.info("training goes on from step %d", trainer.steps)


def _rehearse(parts: Parts) -> None:
    """Compiles what a step and a judgement run, on nothing: it takes longer than a device may be asked for."""
    width, _ = _reads(parts.drafter)
    hidden, depth = parts.trainer.frozen.head.shape[1], parts.config.gate.depth
    rows = [torch.zeros(depth + 2, size, dtype=torch.bfloat16) for size in (width, hidden)]
    nothing = Run(torch.zeros(depth + 2, dtype=torch.int64), *rows)
    packs = pack([nothing], parts.config.entries, parts.device) * len(parts.trainer.team.present)
    parts.trainer.gradients(packs)
    parts.judge.rehearse(parts.trainer, packs[:1])


def _end_overdue(rank: int, config: TrainConfig) -> None:
    """At once, like a kill, which checkpoints are made for: what a device is held by cannot be stopped otherwise."""
    log.error(
        "rank %d has not given its device back within %g s, and rollouts need it: the trainer ends. Started again, it "
        "goes on from its last checkpoint. Raise [spot] within_s, or lower entries",
        rank,
        config.spot.within_s,
    )
    os._exit(1)


def _models(config: TrainConfig) -> tuple[Path, Drafter, Drafter]:
    """The target's folder; the drafter that will be trained, and the one that it began as."""
    target, shape = find_target(config.target)
    first = start_of(config)
    if config.drafter is None and not first.exists():
        create(config.target, first, config.drafter_kind or DrafterKind.EAGLE, seed=config.seed)
    drafter, start = load_drafter(first), load_drafter(first)
    for name in ("hidden_size", "vocab_size"):
        if drafter.config[name] != (wanted := getattr(shape, name)):
            raise ConfigError(f"drafter {first}: {name} {drafter.config[name]}; the target's is {wanted}")
    return target, drafter, start


def _trainer(config: TrainConfig, target: Path, drafter: Drafter, device: torch.device) -> Trainer:
    frozen = load_frozen(target, -1, torch.bfloat16 if device.type == "cuda" else torch.float32)
    limit(config.memory_gb, device, needed(drafter.network, frozen))
    network, objective = drafter.network.to(device), objective_of(config, drafter.config)
    return Trainer(network, frozen.to(device), objective, config.optimizer, config.seed)


def objective_of(config: TrainConfig, drafter: Mapping[str, Any]) -> Objective:
    """What a drafter with this config.json learns by. ConfigError: a loss that it cannot learn by."""
    kind = DrafterKind.EAGLE3 if NETWORKS[drafter["architectures"][0]] is Eagle3 else DrafterKind.EAGLE
    objective = OBJECTIVES[config.loss or OF_KIND[kind]]
    if objective.state and kind is DrafterKind.EAGLE3:
        raise ConfigError(f"loss {config.loss}: compares states, which EAGLE-3 does not imitate. Take eagle3")
    return replace(
        objective,
        token_loss=config.token_loss,
        likeliest=objective.likeliest if config.likeliest is None else config.likeliest,
        steps=config.chain or objective.steps,
    )


def _reads(drafter: Drafter) -> tuple[int, DrafterKind]:
    """Width of the states that it reads, and its kind."""
    if isinstance(drafter.network, Eagle3):
        return drafter.network.fc.in_features, DrafterKind.EAGLE3
    return int(drafter.config["hidden_size"]), DrafterKind.EAGLE
