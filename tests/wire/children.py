"""What the processes of test_wire_processes.py run: a trainer that may be slow, a receiver that may lack space."""

import asyncio
import resource
import time
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tests.wire.ends import CHUNK, HELLO, MODEL, drafter
from tlt_server.wire.messages import (
    READS_TO_SERVER,
    READS_TO_TRAINER,
    Buffer,
    Chunk,
    Hello,
    Message,
)
from tlt_server.wire.server import Receiver
from tlt_server.wire.sockets import Link
from tlt_server.wire.trainer import Sender


class CountingLink(Link):
    """Counts the chunks that it sends, and takes a while for each."""

    def __init__(self, address: str, sent: "Synchronized[int]", pause: float) -> None:
        super().__init__(address, READS_TO_TRAINER)
        self._sent, self._pause = sent, pause

    def send(self, message: Message, payload: Buffer | None = None, to: bytes = b"") -> bool:
        if isinstance(message, Chunk):
            time.sleep(self._pause)
            self._sent.value += 1
        return super().send(message, payload, to)


def trainer_process(
    address: str, version: int, chunks: int, pause: float, sent: "Synchronized[int]", told: Connection
) -> None:
    settled: set[int] = {0}

    def hear(_: str, hello: Hello) -> None:
        if (version := max(hello.newest_drafter, hello.settled_drafter)) not in settled:
            settled.add(version)
            told.send(version)

    sender = Sender(CountingLink(address, sent, pause), MODEL, hear, chunk_bytes=CHUNK)
    sender.publish(version, 0, drafter(version, chunks))
    sender.run()


def receive(address: str, server: Connection, hello: Hello, folder: Path) -> None:
    """A receiver that tells a pipe, until that is closed."""
    receiver = Receiver(Link(address, READS_TO_SERVER, hello.server), hello, folder)
    receiver.told = server.send
    try:
        asyncio.run(receive_until_told(receiver, server))
    finally:
        receiver.close()


async def receive_until_told(receiver: Receiver, server: Connection) -> None:
    loop, running = asyncio.get_running_loop(), asyncio.ensure_future(receiver.run())

    def end() -> None:
        loop.remove_reader(server.fileno())
        running.cancel()

    loop.add_reader(server.fileno(), end)
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def receiver_process(address: str, server: Connection, folder: Path, largest_file: int | None) -> None:
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    receive(address, server, HELLO, folder)


def link_that_reads_late(address: str, seconds: float) -> None:
    """The trainer's end of a link, which is read only after so long; ends once all is read."""
    link = Link(address, READS_TO_TRAINER)
    time.sleep(seconds)
    while link.receive() is not None:
        pass
    link.close()


def link_that_says_much_and_goes(address: str, seconds: float) -> None:
    """A server's end of a link; all the time there is more to send than is read."""
    link, until = Link(address, READS_TO_SERVER, "a server"), time.monotonic() + seconds
    while time.monotonic() < until:
        link.send(HELLO)
        time.sleep(0.001)
    link.close()
