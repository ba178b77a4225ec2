"""Servers' ends of the drafter trainer's link, each a process, and how long a drafter takes to all of them."""

import asyncio
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import zmq.auth
from tlt_client import DrafterUpdate

from tlt_server.wire.messages import READS_TO_SERVER, READS_TO_TRAINER, Buffer, Chunk, Hello, Message, ModelIdentity
from tlt_server.wire.server import Receiver
from tlt_server.wire.sockets import TRAINER, CurveKeys, Link
from tlt_server.wire.trainer import Sender

MODEL = ModelIdentity("Qwen2ForCausalLM", 3584, 152064)
SPAWN = multiprocessing.get_context("spawn")


class Sent(NamedTuple):
    """seconds: from the publication until the last receiver had it. from_trainer: bytes of chunks that left it."""

    seconds: float
    from_trainer: int


class CountingLink(Link):
    """sent: bytes of chunks."""

    sent = 0

    def send(self, message: Message, payload: Buffer | None = None, to: bytes = TRAINER) -> bool:
        was_sent = super().send(message, payload, to)
        if was_sent and payload is not None and isinstance(message, Chunk):
            self.sent += memoryview(payload).nbytes
        return was_sent


def sent(receivers: int, size: int, fan_out: int, *, encrypted: bool = False) -> Sent:
    """A file to so many receivers, over sockets of this machine: in files, or encrypted over the loopback."""
    file = bytes(size)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        keys = _keys(Path(folder)) if encrypted else None
        address = "tcp://127.0.0.1:*" if encrypted else f"ipc://{folder}/control"
        link = CountingLink(address, READS_TO_TRAINER, curve=keys)
        doors, ready = set[str](), threading.Event()

        def hear(peer: str, hello: Hello) -> None:
            if hello.door or fan_out == 0:
                doors.add(peer)
            if len(doors) == receivers:
                ready.set()

        sender = Sender(link, MODEL, hear, fan_out=fan_out, pays=0)
        thread, got = threading.Thread(target=sender.run), SPAWN.Queue()
        thread.start()
        settings = [(link.address, number, folder, got, encrypted) for number in range(receivers)]
        processes = [SPAWN.Process(target=_receive, args=each) for each in settings]
        try:
            for process in processes:
                process.start()
            if not ready.wait(timeout=120):
                raise TimeoutError(f"{len(doors)} of {receivers} receivers came")
            began = time.monotonic()
            sender.publish(1, 0, file)
            ended = max(got.get(timeout=300) for _ in processes)
        finally:
            sender.stop()
            thread.join()
            for process in processes:
                process.kill()
                process.join()
    return Sent(ended - began, link.sent)


def _keys(folder: Path) -> CurveKeys:
    """The trainer's; one for all servers beside it."""
    for name in ("trainer", "server"):
        _, secret = zmq.auth.create_certificates(folder, name)
        Path(secret).chmod(0o600)
    (folder / "known").mkdir()
    (folder / "server.key").rename(folder / "known" / "server.key")
    return CurveKeys(folder / "trainer.key_secret", folder / "known")


def _receive(address: str, number: int, folder: str, got: Any, encrypted: bool) -> None:
    """A server's end, until it is killed."""
    hello = Hello(
        server=f"host{number}:30000",
        model=MODEL,
        target_version=0,
        weight_version="0",
        drafter_version=0,
        newest_drafter=0,
    )
    keys = CurveKeys(Path(folder) / "server.key_secret", Path(folder) / "trainer.key") if encrypted else None
    link = Link(address, READS_TO_SERVER, hello.server, keys)
    receiver = Receiver(link, hello, Path(folder) / str(number))
    receiver.told = lambda what: got.put(time.monotonic()) if isinstance(what, DrafterUpdate) else None
    asyncio.run(receiver.run())
