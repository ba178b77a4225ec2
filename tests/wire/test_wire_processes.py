"""Sender and receiver as real processes, over ipc and tcp, killed, stopped and starved."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
from tlt_client import DrafterTrainer, DrafterUpdate

from tests.forks import FORKS
from tests.wire.children import (
    link_that_reads_late,
    link_that_says_much_and_goes,
    receiver_process,
    trainer_process,
)
from tests.wire.ends import CHUNK, drafter, holds
from tlt_server.process import free_port

pytestmark = pytest.mark.slow

T = TypeVar("T")
CHUNKS = 200
IPC = pytest.mark.parametrize("processes", ["ipc"], indirect=True)


class Processes:
    """Starts trainers and receivers, one of each at a time, on one address."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self.sent = FORKS.Value("i", 0)
        self.started: list[Any] = []
        self.pipes: list[Connection] = []

    def _start(self, target: Callable[..., None], *args: Any) -> Any:
        process = FORKS.Process(target=target, args=args)
        process.start()
        self.started.append(process)
        return process

    def _pipe(self) -> tuple[Connection, Connection]:
        ours, theirs = FORKS.Pipe()
        self.pipes += [ours, theirs]
        return ours, theirs

    def trainer(self, version: int = 1, chunks: int = CHUNKS, pause: float = 0.0) -> Any:
        """A process that publishes; `told` hears the versions that were received or refused."""
        self.told, theirs = self._pipe()
        self.sent.value = 0
        return self._start(trainer_process, self.address, version, chunks, pause, self.sent, theirs)

    def receiver(self, largest_file: int | None = None) -> Any:
        """A receiver; `pipe` is its server's end."""
        self.pipe, theirs = self._pipe()
        process = self._start(receiver_process, self.address, theirs, self.folder, largest_file)
        theirs.close()
        return process

    def hear(self, kind: type[T]) -> T:
        """The next message of a kind that the receiver tells its server."""
        deadline = time.monotonic() + 30
        while self.pipe.poll(deadline - time.monotonic()):
            if isinstance(message := self.pipe.recv(), kind):
                return message
        raise AssertionError(f"no {kind} in time")

    def arrived(self) -> int:
        """Bytes of the transfer under way."""
        return sum(path.stat().st_size for path in self.folder.glob("*.partial"))

    def await_arrived(self, chunks: int) -> None:
        deadline = time.monotonic() + 30
        while self.arrived() < chunks * CHUNK:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self) -> None:
        for process in self.started:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture(params=["ipc", "tcp"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    address = f"ipc://{tmp_path}/s" if request.param == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    made = Processes(address, tmp_path / "drafters")
    yield made
    made.end()


def test_a_drafter_crosses(processes: Processes) -> None:
    processes.trainer()
    receiver = processes.receiver()
    ready = processes.hear(DrafterUpdate)
    assert holds(ready.path, drafter(1, CHUNKS))
    assert processes.told.poll(10)
    assert processes.told.recv() == 1
    assert CHUNKS <= processes.sent.value <= CHUNKS + 1  # the file's header may make one more

    processes.pipe.close()  # as the server's end would
    receiver.join(10)
    assert receiver.exitcode == 0
    assert list(processes.folder.iterdir()) == []


def test_a_trainer_killed_in_mid_push_goes_on_where_it_was(processes: Processes) -> None:
    trainer = processes.trainer(pause=0.005)
    processes.receiver()
    processes.await_arrived(CHUNKS // 2)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    processes.trainer()
    ready = processes.hear(DrafterUpdate)
    assert holds(ready.path, drafter(1, CHUNKS))
    assert processes.sent.value <= CHUNKS // 2 + 1


@IPC
def test_a_trainer_killed_in_mid_push_may_come_back_with_a_newer_one(processes: Processes) -> None:
    trainer = processes.trainer(pause=0.005)
    processes.receiver()
    processes.await_arrived(CHUNKS // 4)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    processes.trainer(version=2)
    assert processes.hear(DrafterUpdate).version == 2
    assert [path.name for path in processes.folder.iterdir()] == ["drafter-2.safetensors"]


def test_a_receiver_killed_in_mid_push_goes_on_where_it_was(processes: Processes) -> None:
    processes.trainer(pause=0.005)
    receiver = processes.receiver()
    processes.await_arrived(CHUNKS // 2)
    os.kill(receiver.pid, signal.SIGKILL)
    receiver.join()
    kept = processes.arrived() // CHUNK
    before = processes.sent.value
    processes.receiver()
    ready = processes.hear(DrafterUpdate)
    assert holds(ready.path, drafter(1, CHUNKS))
    assert processes.sent.value - before <= CHUNKS + 1 - kept + 4


@IPC
def test_a_receiver_killed_when_it_had_it_all_gets_it_again(processes: Processes) -> None:
    processes.trainer()
    receiver = processes.receiver()
    processes.hear(DrafterUpdate)
    os.kill(receiver.pid, signal.SIGKILL)
    receiver.join()
    processes.receiver()
    ready = processes.hear(DrafterUpdate)
    assert holds(ready.path, drafter(1, CHUNKS))


@IPC
def test_a_receiver_that_is_interrupted_leaves_no_file(processes: Processes) -> None:
    processes.trainer(pause=0.002)
    receiver = processes.receiver()
    processes.await_arrived(CHUNKS // 4)
    os.kill(receiver.pid, signal.SIGINT)
    receiver.join(10)
    assert receiver.exitcode == 1
    assert list(processes.folder.iterdir()) == []


@IPC
@pytest.mark.parametrize("who", ["trainer", "receiver"])
def test_one_that_is_stopped_for_a_while_goes_on(processes: Processes, who: str) -> None:
    trainer, receiver = processes.trainer(pause=0.002), processes.receiver()
    processes.await_arrived(CHUNKS // 4)
    stopped = trainer if who == "trainer" else receiver
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(1.5)
    under_way = processes.sent.value - processes.arrived() // CHUNK
    os.kill(stopped.pid, signal.SIGCONT)
    assert under_way <= 4 + 1  # the credit, and one that is counted before it is sent
    ready = processes.hear(DrafterUpdate)
    assert holds(ready.path, drafter(1, CHUNKS))


@IPC
@pytest.mark.parametrize("missing", [1, CHUNKS * CHUNK // 2])
def test_a_full_disk_is_refused_and_the_receiver_lives_on(processes: Processes, missing: int) -> None:
    trainer = processes.trainer()
    processes.receiver(largest_file=len(drafter(1, CHUNKS)) - missing)
    while not (refused := processes.hear(DrafterTrainer)).refused:
        pass
    assert refused.reason == f"cannot write to {processes.folder}: File too large"
    assert processes.told.poll(10)
    assert processes.told.recv() == 1
    assert list(processes.folder.iterdir()) == []
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    processes.trainer(version=2, chunks=10)
    ready = processes.hear(DrafterUpdate)
    assert holds(ready.path, drafter(2, 10))


@IPC
def test_a_stranger_who_sends_garbage_disturbs_nobody(processes: Processes) -> None:
    processes.trainer(pause=0.002)
    processes.receiver()
    processes.await_arrived(CHUNKS // 10)
    ended = threading.Event()

    def babble() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.linger = 0
            raw.connect(processes.address)
            while not ended.is_set():
                raw.send_multipart([os.urandom(40), os.urandom(10)])
                time.sleep(0.001)

    babbler = threading.Thread(target=babble)
    babbler.start()
    try:
        ready = processes.hear(DrafterUpdate)
    finally:
        ended.set()
        babbler.join()
    assert holds(ready.path, drafter(1, CHUNKS))


@IPC
def test_a_trainer_may_come_long_after_the_server(processes: Processes) -> None:
    processes.receiver()
    time.sleep(0.5)
    assert not processes.pipe.poll()
    processes.trainer()
    assert processes.hear(DrafterTrainer) == DrafterTrainer(address=processes.address, connected=True)
    processes.hear(DrafterUpdate)


def test_a_peer_that_goes_while_a_queue_is_full_does_no_harm(tmp_path: Path) -> None:
    """libzmq aborted the process that was to read it, when the next heartbeat was due."""
    processes = []
    for address in (f"ipc://{tmp_path}/control", f"tcp://127.0.0.1:{free_port()}"):
        processes.append(FORKS.Process(target=link_that_reads_late, args=(address, 8.0)))
        processes.append(FORKS.Process(target=link_that_says_much_and_goes, args=(address, 1.5)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
