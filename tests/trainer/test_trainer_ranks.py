"""`tlt-server train` in several processes, and beside servers whose load comes and goes."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.trainer.models import texts
from tests.trainer.stand_in import Running, Server, until
from tlt_server.config import DrafterKind
from tlt_server.demo import default_paths
from tlt_server.drafter.folder import create
from tlt_server.trainer.checkpoint import Checkpoints, newest
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.losses import EAGLE
from tlt_server.trainer.learn.packing import pack
from tlt_server.trainer.publish.folder import load_drafter, load_frozen
from tlt_server.wire.devices import identity

HERE = identity(torch.device("cpu"))
FOR_EVER = "passes = 100000.0"
DRAINING = "waiting for rollouts on its GPU"


@pytest.mark.slow
def test_two_processes_go_on_where_one_was_and_one_where_two_were(tmp_path: Path) -> None:
    """Of the two one is killed: the other ends with it, and the output says which it was."""
    trainer, steps = Running(tmp_path / "trainer", FOR_EVER), 30
    _train_alone(trainer.folder, steps)
    with Server(tmp_path / "one", trainer.control, trainer.features) as server:
        with trainer.process(ranks=2) as process:
            saved = _trained_beyond(trainer, server, steps)
            assert len(trainer.status()["workers"]) == 2
            ranks = _ranks(process.pid)
            ranks[1].kill()
            assert process.wait(60) != 0
            assert not any(rank.is_running() for rank in ranks)
            assert f"exitcode  : -9 (pid: {ranks[1].pid})" in trainer.log
        with trainer.process() as process:
            _trained_beyond(trainer, server, saved)
            trainer.end(process)


def _train_alone(folder: Path, steps: int) -> None:
    """Leaves what a trainer of one process leaves."""
    target = default_paths()[0]
    create(str(target), folder / "start", DrafterKind.EAGLE)
    trainer = Trainer(load_drafter(folder / "start").network, load_frozen(target, 0), EAGLE)
    trainer.step(pack(texts("eagle", 1), 512, torch.device("cpu")))
    trainer.steps, saves = steps, Checkpoints(folder / "checkpoints")
    saves.save(steps, *trainer.state())
    saves.close()


def _trained_beyond(trainer: Running, server: Server, steps: int) -> int:
    """The steps of a checkpoint after so many; it has never had fewer."""
    until(lambda: server.name in trainer.status().get("servers", []), "the server is not known")
    assert trainer.status()["steps"] >= steps
    server.push(range(40))

    def saved() -> int:
        found = newest(trainer.folder / "checkpoints")
        assert found is not None
        return max(found.facts["steps"] - steps, 0)

    return steps + int(until(saved, "it does not train"))


def _ranks(torchrun: int) -> list[psutil.Process]:
    """In their order."""
    ranks = [each for each in psutil.Process(torchrun).children() if "train" in each.cmdline()]
    return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))


class Loaded:
    """Reports a server's load all the time. running: None is silence."""

    def __init__(self, server: Server) -> None:
        self.running: int | None = 1
        self._server, self._over = server, threading.Event()
        self._thread = threading.Thread(target=self._report)

    @contextlib.contextmanager
    def reported(self) -> "Iterator[Loaded]":
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()

    def _report(self) -> None:
        while not self._over.wait(0.1):
            if self.running is not None:
                self._server.change(load=self.running)


def spot(folder: Path, **settings: float) -> Running:
    """A trainer that shares its device with servers, of many short steps."""
    said = "\n".join(f"{name} = {value}" for name, value in settings.items())
    return Running(folder, FOR_EVER, tables=f"[spot]\non = true\nsettle_s = 0.3\n{said}")


@pytest.mark.slow
def test_no_step_begins_while_rollouts_need_the_device(tmp_path: Path) -> None:
    trainer = spot(tmp_path / "trainer", silence_s=2.0, within_s=30.0)
    server = Server(tmp_path / "one", trainer.control, trainer.features, devices=(HERE,))
    with server, Loaded(server).reported() as load, trainer.process() as process:
        until(lambda: trainer.status().get("state") == DRAINING, "it does not wait")
        server.push(range(40))
        until(lambda: trainer.status()["tokens_received"], "no features arrive")
        assert _no_step_for(1.0, trainer) == 0
        for needed in (1, 3, None):
            load.running = 0
            before = trainer.status()["steps"]
            until(lambda before=before: trainer.status()["steps"] > before + 2, "it does not train")
            assert _worker(trainer)["state"] == "training"
            # at least once more: on a busy machine reports may come so late that it yields to their silence, too
            given, load.running = _worker(trainer)["yields"], needed
            until(lambda: trainer.status()["state"] == DRAINING, "it does not yield")
            assert _worker(trainer)["state"] == "busy"
            assert _worker(trainer)["yields"] > given
            _no_step_for(0.5, trainer)
        assert 0 < _worker(trainer)["slowest_yield_s"] < 30
        assert min(_worker(trainer)["seconds"][state] for state in ("busy", "training")) > 0
        assert 'tlt_train_worker_state{rank="0",state="busy"} 1.0' in trainer.get("/metrics").text
        trainer.end(process)


def _worker(trainer: Running) -> dict[str, object]:
    (worker,) = trainer.status()["workers"]
    return dict(worker)


def _no_step_for(seconds: float, trainer: Running) -> int:
    steps = trainer.status()["steps"]
    time.sleep(seconds)
    assert trainer.status()["steps"] == steps
    return int(steps)


@pytest.mark.slow
def test_a_step_that_outlasts_its_time_is_ended_with_the_trainer(tmp_path: Path) -> None:
    trainer = spot(tmp_path / "trainer", within_s=0.001)
    server = Server(tmp_path / "one", trainer.control, trainer.features, devices=(HERE,))
    with server, Loaded(server).reported() as load, trainer.process() as process:
        load.running = 0
        until(lambda: server.name in trainer.status().get("servers", []), "the server is not known")
        server.push(range(40))
        while process.poll() is None:  # load that comes at the end of a step meets no step that is late
            load.running = 0
            steps = trainer.status()["steps"]
            until(lambda steps=steps: trainer.status()["steps"] > steps + 2, "it does not train")
            load.running = 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == 1
    assert "rank 0 has not given its device back within 0.001 s" in trainer.log
