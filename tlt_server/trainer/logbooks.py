"""A trainer's figures over its steps, for TensorBoard or Weights & Biases (offline): those that Prometheus reads.

    FOLDER/tensorboard    tensorboard --logdir FOLDER/tensorboard
    FOLDER/wandb          wandb sync FOLDER/wandb/offline-run-*

A thread writes them: no step waits for it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from tlt_server.errors import ConfigError
from tlt_server.trainer.config import Logbook
from tlt_server.trainer.status import Metrics, Status

Write: TypeAlias = Callable[[int, Mapping[str, float]], object]
"""Takes a step and its figures by name."""

LOOK_EVERY = 5.0
"""Seconds, in which several steps may be made: figures of the last are written."""


def figures(status: Status) -> dict[str, float]:
    """By Prometheus' name, and the values of its labels: `tlt_train_loss`, `tlt_train_candidate_reach/1`."""
    samples = (sample for metric in Metrics(lambda: status).collect() for sample in metric.samples)
    return {"/".join((sample.name, *sample.labels.values())): float(sample.value) for sample in samples}


def require(names: Sequence[Logbook]) -> None:
    """Raises ConfigError: a package is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(f"logbook {missing[0]}: not installed. pip install 'tlt-server[{missing[0]}]', or drop it")


@contextmanager
def kept(names: Sequence[Logbook], folder: Path, read: Callable[[], Status]) -> Iterator[None]:
    """Writes what `read` returns after steps while the context lasts, and at its end. ConfigError: as `require`."""
    require(names)
    with ExitStack() as stack:
        books = [stack.enter_context(OPEN[name](folder)) for name in names]
        over = threading.Event()
        thread = threading.Thread(target=_write, args=(books, read, over), name="logbooks")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _write(books: Sequence[Write], read: Callable[[], Status], over: threading.Event) -> None:
    written, is_last = 0, not books
    while not is_last:
        is_last = over.wait(LOOK_EVERY)
        status = read()
        if status.steps > written:
            written = status.steps
            for write in books:
                write(status.steps, figures(status))


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(step: int, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path) -> Iterator[Write]:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run: Any = wandb.init(mode="offline", dir=str(folder), project="tlt-server", settings=wandb.Settings(silent=True))
    try:
        yield lambda step, found: run.log(dict(found), step=step)
    finally:
        run.finish()


OPEN = {"tensorboard": _tensorboard, "wandb": _wandb}
