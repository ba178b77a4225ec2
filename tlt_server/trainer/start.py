"""From settings to a running trainer: everything is checked before anything is trained."""

import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import torch

from tlt_server.config import DrafterKind
from tlt_server.drafter.folder import create
from tlt_server.drafter.target import find_target
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config
from tlt_server.trainer.buffer import Buffer
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.config import TrainConfig
from tlt_server.trainer.folder import Drafter, load_drafter, load_frozen
from tlt_server.trainer.inbox import Inbox
from tlt_server.trainer.judge import Judge
from tlt_server.trainer.loop import Trainer
from tlt_server.trainer.losses import EAGLE, EAGLE3, HASS, Objective
from tlt_server.trainer.network import Eagle3
from tlt_server.trainer.published import Published
from tlt_server.trainer.servers import Servers
from tlt_server.trainer.service import Parts, Service
from tlt_server.trainer.status import shown
from tlt_server.wire.messages import READS_TO_TRAINER, Message, ModelIdentity
from tlt_server.wire.sender import Sender
from tlt_server.wire.sockets import CurveKeys, Inlet, Link

log = logging.getLogger(__name__)

OBJECTIVES = {"eagle": EAGLE, "hass": HASS, "eagle3": EAGLE3}


def train(config: TrainConfig) -> None:
    """Runs a trainer until SIGINT or SIGTERM.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    torch.set_num_threads(config.threads or max(1, torch.get_num_threads() - 1))
    with prepared(config) as parts, ThreadPoolExecutor(1, "control") as thread:
        sending = thread.submit(parts.sender.run)
        service = Service(parts, lambda: over.is_set() or sending.done())
        try:
            with shown(config.host, config.port, lambda: service.status) as url:
                log.info("the trainer listens at %s, for features at %s; %s", config.listen, parts.inlet.address, url)
                service.run()
        finally:
            parts.sender.stop()
        sending.result()


@contextmanager
def prepared(config: TrainConfig) -> Iterator[Parts]:
    """All parts of a service; what they hold is released at the end.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    device = _device(config)
    folder = Path(config.folder)
    target, drafter, start = _models(config, folder)
    trainer = _trainer(config, target, drafter, device)
    published = Published(folder)
    published.clear_away()
    with ExitStack() as stack:
        checkpoints = Checkpoints(folder / "checkpoints", config.keep)
        stack.callback(checkpoints.close)
        if (saved := checkpoints.newest()) is not None:
            trainer.restore(*saved)
            log.info("training goes on from step %d", trainer.steps)
        curve = CurveKeys(Path(config.key), Path(config.server_keys)) if config.key and config.server_keys else None
        inlet = Inlet(config.features_address, curve)
        stack.callback(inlet.close)
        model, servers = ModelIdentity.of(read_config(target)), Servers()
        heard: SimpleQueue[tuple[str, Message]] = SimpleQueue()
        sender = Sender(Link(config.listen, READS_TO_TRAINER, curve=curve), model, lambda *said: heard.put(said))
        width, kind = _reads(drafter)
        yield Parts(
            config=config,
            device=device,
            drafter=drafter,
            trainer=trainer,
            buffer=Buffer(width, model.hidden_size, config.buffer_mb << 20, config.max_age, config.held_out),
            judge=Judge(config.gate, config.entries, start.network, published, device),
            checkpoints=checkpoints,
            published=published,
            servers=servers,
            inlet=inlet,
            inbox=Inbox(inlet, model, kind, width, servers.targets),
            sender=sender,
            heard=heard,
        )


def _device(config: TrainConfig) -> torch.device:
    try:
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {config.device}: {str(error).splitlines()[0]}") from error
    return device


def _models(config: TrainConfig, folder: Path) -> tuple[Path, Drafter, Drafter]:
    """The target's folder; the drafter that will be trained, and the one that it began as."""
    target, shape = find_target(config.target)
    first = Path(config.drafter) if config.drafter else folder / "start"
    if config.drafter is None and not first.exists():
        create(config.target, first, config.drafter_kind, seed=config.seed)
    drafter, start = load_drafter(first), load_drafter(first)
    for name in ("hidden_size", "vocab_size"):
        if drafter.config[name] != (wanted := getattr(shape, name)):
            raise ConfigError(f"drafter {first}: {name} {drafter.config[name]}; the target's is {wanted}")
    return target, drafter, start


def _trainer(config: TrainConfig, target: Path, drafter: Drafter, device: torch.device) -> Trainer:
    frozen = load_frozen(target, -1, torch.bfloat16 if device.type == "cuda" else torch.float32)
    frozen = replace(frozen, embedding=frozen.embedding.to(device), head=frozen.head.to(device))
    drafter.network.to(device)
    return Trainer(drafter.network, frozen, _objective(config, drafter), config.optimizer, config.seed)


def _objective(config: TrainConfig, drafter: Drafter) -> Objective:
    _, kind = _reads(drafter)
    objective = OBJECTIVES[config.loss or str(kind)]
    if objective.state and kind is DrafterKind.EAGLE3:
        raise ConfigError(f"loss {config.loss}: compares states, which EAGLE-3 does not imitate. Take eagle3")
    return replace(objective, token_loss=config.token_loss)


def _reads(drafter: Drafter) -> tuple[int, DrafterKind]:
    """Width of the states that it reads, and its kind."""
    if isinstance(drafter.network, Eagle3):
        return drafter.network.fc.in_features, DrafterKind.EAGLE3
    return int(drafter.config["hidden_size"]), DrafterKind.EAGLE
