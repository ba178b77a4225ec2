"""Servers as processes that pass a drafter on, one of them killed, or stopped, in the middle."""

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tlt_client import DrafterUpdate

from tests.forks import FORKS
from tests.link.processes import until
from tests.wire.children import CountingLink, receive
from tests.wire.ends import ANY_PORT, HELLO, MODEL, drafter, holds
from tlt_server.wire.trainer import Sender

pytestmark = pytest.mark.slow

CHUNK, CHUNKS, SERVERS = 64 << 10, 300, 6


class Grove:
    """A trainer in a thread, which takes a while for each chunk, and servers as processes. sent: chunks of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sent = FORKS.Value("i", 0)
        link = CountingLink(ANY_PORT, self.sent, 0.004)
        self.sender = Sender(link, MODEL, lambda *_: None, chunk_bytes=CHUNK, pays=0)
        self._thread = threading.Thread(target=self.sender.run)
        self._thread.start()
        self.processes: dict[str, Any] = {}
        self.pipes: dict[str, Connection] = {}
        for number in range(SERVERS):
            self._start(link.address, f"host{number}:1")

    def _start(self, address: str, name: str) -> None:
        self.pipes[name], theirs = FORKS.Pipe()
        hello = msgspec.structs.replace(HELLO, server=name)
        self.processes[name] = FORKS.Process(target=receive, args=(address, theirs, hello, self._folder / name))
        self.processes[name].start()
        theirs.close()

    @property
    def sources(self) -> dict[str, str | None]:
        """Whom each fetches from, by names."""
        places = dict(self.sender._tree._places)
        named = {peer: peer.decode().rpartition("/")[0] for peer in places}
        return {named[peer]: named[place.above] if place.above else None for peer, place in places.items()}

    def doors(self) -> int:
        return sum(bool(member.door) for member in list(self.sender._tree.members.values()))

    def arrived(self, name: str) -> int:
        """Chunks."""
        return sum(path.stat().st_size for path in (self._folder / name).glob("*.partial")) // CHUNK

    def has(self, name: str, version: int, file: bytes) -> None:
        while self.pipes[name].poll(30):
            if isinstance(told := self.pipes[name].recv(), DrafterUpdate):
                assert told.version == version
                assert holds(told.path, file)
                return
        raise AssertionError(f"{name} has no drafter in time")

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        for pipe in self.pipes.values():
            pipe.close()
        self.sender.stop()
        self._thread.join()


@pytest.fixture
def grove(tmp_path: Path) -> Iterator[Grove]:
    made = Grove(tmp_path)
    try:
        until(lambda: made.doors() == SERVERS)
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_source_that_is_gone_in_the_middle(grove: Grove, how: signal.Signals) -> None:
    file = drafter(1, CHUNKS * CHUNK // 1024)
    grove.sender.publish(1, 0, file)
    until(lambda: len(grove.sources) == SERVERS)
    sources = grove.sources
    source = next(name for name in sources if name in sources.values())
    below = [name for name in sources if sources[name] == source]
    until(lambda: all(grove.arrived(name) > CHUNKS // 5 for name in below))
    os.kill(grove.processes[source].pid, how)
    for name in sources:
        if name != source:
            grove.has(name, 1, file)
    assert grove.sent.value < 4.5 * CHUNKS  # by the star it is once for each of six
    doubted = {peer.decode().rpartition("/")[0] for peer in grove.sender._tree._doubted}
    assert doubted == {source, *below}
    if how is signal.SIGSTOP:
        os.kill(grove.processes[source].pid, signal.SIGCONT)
        grove.has(source, 1, file)
        grove.sender.publish(2, 0, drafter(2))
        for name in sources:
            grove.has(name, 2, drafter(2))


def test_a_newer_drafter_in_the_middle(grove: Grove) -> None:
    grove.sender.publish(1, 0, drafter(1, CHUNKS * CHUNK // 1024))
    until(lambda: len(grove.sources) == SERVERS)
    until(lambda: all(grove.arrived(name) > CHUNKS // 10 for name in grove.sources))
    grove.sender.publish(2, 0, file := drafter(2, CHUNKS * CHUNK // 1024))
    for name in grove.processes:
        grove.has(name, 2, file)
    assert not grove.sender._tree._doubted
