"""The ends of a control link, stepped by the test: a server, a trainer, and a trainer that says what it is told."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tlt_client import DrafterTrainer, DrafterUpdate

from tlt_server.errors import ConfigError
from tlt_server.wire.messages import (
    READS_TO_DOOR,
    READS_TO_SERVER,
    READS_TO_TRAINER,
    Buffer,
    Hello,
    Message,
    ModelIdentity,
)
from tlt_server.wire.server import Receiver
from tlt_server.wire.sockets import TRAINER, CurveKeys, Link
from tlt_server.wire.trainer import Outgoing, Sender

MODEL = ModelIdentity("LlamaForCausalLM", 64, 512)
HELLO = Hello(
    server="host:30000", model=MODEL, target_version=0, weight_version="step-0", drafter_version=0, newest_drafter=0
)
CHUNK = 1 << 10
ANY_PORT = "tcp://127.0.0.1:*"
Clock = Callable[[], float]
M = TypeVar("M")


def drafter(seed: int, chunks: int = 10) -> bytes:
    """A file of a little more than so many chunks, none of which, of any seeds, are alike."""
    return b"header" + b"".join((seed << 40 | i).to_bytes(8, "little") for i in range(chunks * CHUNK // 8))


def holds(path: str | Path, file: bytes) -> bool:
    return Path(path).read_bytes() == file


def outgoing(seed: int = 0, version: int = 1, chunks: int = 10, chunk_bytes: int = CHUNK) -> Outgoing:
    return Outgoing(drafter(seed, chunks), version, 3, MODEL, chunk_bytes)


@dataclass
class Hands:
    """A clock that the test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class End:
    """Something with a link, closed at the end of a test or before."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.open = True

    def step(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.open = False
        self.link.close()


class Server(End):
    """A receiver. heard: what it tells its server."""

    def __init__(
        self,
        address: str,
        folder: Path,
        hello: Hello = HELLO,
        clock: Clock = time.monotonic,
        most: int | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        super().__init__(Link(address, READS_TO_SERVER, hello.server, curve))
        self.folder = folder
        self.heard: list[DrafterUpdate | DrafterTrainer] = []
        try:
            self.receiver = Receiver(self.link, hello, folder, clock, most, CHUNK)
        except ConfigError:
            super().close()
            raise
        self.receiver.told = self.heard.append
        self.change = self.receiver.change

    def step(self) -> None:
        self.link.wait(0.002)
        self.receiver.step()

    def said(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def drafters(self) -> list[int]:
        return [message.version for message in self.said(DrafterUpdate)]

    def refusals(self) -> list[str]:
        """Why drafters were refused, each once."""
        return list(dict.fromkeys(message.reason for message in self.said(DrafterTrainer) if message.reason))

    @property
    def is_connected(self) -> bool:
        """Whether a trainer answers, as far as it has told."""
        return bool(self.said(DrafterTrainer)) and self.said(DrafterTrainer)[-1].connected

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def close(self) -> None:
        self.open = False
        self.receiver.close()


class Trainer(End):
    """A sender. heard: what its servers said. others: of its arguments."""

    def __init__(
        self, address: str = ANY_PORT, clock: Clock = time.monotonic, curve: CurveKeys | None = None, **others: Any
    ) -> None:
        super().__init__(Link(address, READS_TO_TRAINER, curve=curve))
        self.heard: list[tuple[str, Hello]] = []
        self.sender = Sender(self.link, MODEL, lambda *heard: self.heard.append(heard), clock, CHUNK, **others)
        self.publish = self.sender.publish

    def step(self) -> None:
        self.sender.step(0.002)

    def said(self) -> list[Hello]:
        return [hello for _, hello in self.heard]

    def is_told(self, **state: object) -> bool:
        """Whether the last hello says so."""
        return bool(self.heard) and state.items() <= msgspec.structs.asdict(self.said()[-1]).items()


class Scripted(End):
    """An end that says what the test tells it, and keeps what it hears."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.peer = TRAINER
        self._heard: list[Message] = []

    def step(self) -> None:
        self.link.wait(0.002)
        if (arrived := self.link.receive()) is not None:
            self.peer, message, _ = arrived
            self._heard.append(message)

    def say(self, message: Message, payload: Buffer | None = None) -> None:
        assert self.link.send(message, payload, to=self.peer)

    def take(self, kind: type[M]) -> list[M]:
        """What was heard of a kind since the last look."""
        taken = [message for message in self._heard if isinstance(message, kind)]
        self._heard = [message for message in self._heard if not isinstance(message, kind)]
        return taken


class Script(Scripted):
    """A trainer."""

    def __init__(self, curve: CurveKeys | None = None) -> None:
        super().__init__(Link(ANY_PORT, READS_TO_TRAINER, curve=curve))


class Giver(Scripted):
    """A server that others are told to fetch from."""

    def __init__(self) -> None:
        super().__init__(Link(ANY_PORT, READS_TO_DOOR))


class Asker(Scripted):
    """A server, which says hello as soon as it can."""

    def __init__(self, address: str) -> None:
        super().__init__(Link(address, READS_TO_SERVER, HELLO.server))
        self._greeted = False

    def step(self) -> None:
        self._greeted = self._greeted or self.link.send(HELLO)
        super().step()


NewTrainer = Callable[..., Trainer]
NewServer = Callable[..., Server]
Open = Callable[..., Link]


def step_until(done: Callable[[], object], *ends: End, seconds: float = 20) -> None:
    """Steps the ends in turn until something is true."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        for end in ends:
            end.step()


def step_for(seconds: float, *ends: End) -> None:
    """Steps the ends in turn, to see that something does not happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for end in ends:
            end.step()


def heard(link: Link, tries: int = 50) -> tuple[bytes, Message, Any] | None:
    """The next message, waited for; None if none comes in five seconds, or one is rejected."""
    for _ in range(tries):
        link.wait(0.1)
        if (arrived := link.receive()) is not None:
            return arrived
    return None


def say(link: Link, message: Message, **options: Any) -> None:
    """Sends as soon as the connection is there."""
    for _ in range(100):
        if link.send(message, **options):
            return
        link.wait(0.05)
    raise AssertionError("nobody there")
