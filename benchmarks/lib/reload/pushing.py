"""How a drafter's trainer gets a drafter into a server: by a path that the server reads, or over ZMQ."""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Protocol

from benchmarks.lib.reload.steps import Span
from benchmarks.lib.servers import Server
from tlt_server.errors import ServerFailed
from tlt_server.preflight import read_config
from tlt_server.process import free_port
from tlt_server.wire.messages import READS_TO_TRAINER, Buffer, Message, ModelIdentity, Offer
from tlt_server.wire.sockets import TRAINER, Link
from tlt_server.wire.trainer import Sender

EVENT_S = 60.0
"""Within which what was pushed must be in force."""
POLL_S = 0.02


class Swap(NamedTuple):
    """A drafter that was put in force.

    span: from the first byte sent to in force, by the server's word.
    staging_s, flip_s: of it, reading and checking beside the decode steps, and the copy between two of them.
    """

    version: int
    span: Span
    staging_s: float
    flip_s: float


class Events:
    """What a server says of its weights, each event once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._last = 0

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call, oldest first."""
        answer = self.server.http.get(f"{self.server.url}/tlt/v1/events", params={"after": self._last})
        found: list[dict[str, Any]] = answer.raise_for_status().json()
        self._last = max((event["number"] for event in found), default=self._last)
        return found

    def wait(self, kind: str, **detail: Any) -> dict[str, Any]:
        """The next event of a kind with these details.

        Raises:
            ServerFailed: it does not come in time.
        """
        until = time.monotonic() + EVENT_S
        seen: list[dict[str, Any]] = []
        while time.monotonic() < until:
            seen += self.new()
            for event in seen:
                if event["kind"] == kind and event["detail"].items() >= detail.items():
                    return event
            time.sleep(POLL_S)
        raise ServerFailed(f"no event {kind} with {detail} within {EVENT_S:.0f} s; there were {seen}")


class Push(Protocol):
    """A way to push drafters. `flags` are the server's; used in a `with` around it."""

    flags: tuple[str, ...]

    def __enter__(self) -> "Push": ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __call__(self, events: Events, drafter: Path) -> Swap:
        """Returns when the drafter is in force. Raises ServerFailed: it was refused, or did not come into force."""
        ...


class ByPath:
    """`POST /tlt/v1/drafter/update`; the first byte is the request's."""

    flags: tuple[str, ...] = ()

    def __enter__(self) -> "ByPath":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __call__(self, events: Events, drafter: Path) -> Swap:
        sent = time.monotonic()
        server = events.server
        answer = server.http.post(f"{server.url}/tlt/v1/drafter/update", json={"path": str(drafter)})
        if answer.status_code != 200:
            raise ServerFailed(f"{drafter} was refused: {answer.text}")
        return _swapped(events, answer.json()["live"]["version"], sent)


class ByZmq:
    """A trainer in a process of its own; the first byte is that of the update's header.

    target: the model that the drafters are for.
    """

    def __init__(self, target: Path) -> None:
        config = read_config(target)
        self._model = ModelIdentity(config["architectures"][0], config["hidden_size"], config["vocab_size"])
        self._address = f"tcp://127.0.0.1:{free_port()}"
        self.flags = ("--trainer", self._address)
        self._version = 0

    def __enter__(self) -> "ByZmq":
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_trainer, args=(self._address, self._model, theirs))
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()  # which ends it
        self._process.join()

    def __call__(self, events: Events, drafter: Path) -> Swap:
        self._version += 1
        self._pipe.send((self._version, drafter))
        if not self._pipe.poll(EVENT_S):
            raise ServerFailed(f"no server asked for {drafter} within {EVENT_S:.0f} s")
        return _swapped(events, self._version, self._pipe.recv())


WAYS: Mapping[str, Callable[[Path], Push]] = {"path": lambda _: ByPath(), "zmq": ByZmq}
"""By the name that --by takes."""


class _TellingLink(Link):
    """Tells when an update's header is first sent."""

    def __init__(self, address: str, pipe: Connection) -> None:
        super().__init__(address, READS_TO_TRAINER)
        self._pipe, self._told = pipe, 0

    def send(self, message: Message, payload: Buffer | None = None, to: bytes = TRAINER) -> bool:
        now = time.monotonic()
        sent = super().send(message, payload, to)
        if sent and isinstance(message, Offer) and message.version > self._told:
            self._told = message.version
            self._pipe.send(now)
        return sent


def _trainer(address: str, model: ModelIdentity, pipe: Connection) -> None:
    """Publishes the drafters that it is told of, until the pipe is closed."""
    sender = Sender(_TellingLink(address, pipe), model, hear=lambda *_: None)
    running = Thread(target=sender.run)
    running.start()
    try:
        while True:
            version, drafter = pipe.recv()
            (file,) = drafter.glob("*.safetensors")
            sender.publish(version, 0, file.read_bytes())
    except EOFError:
        sender.stop()
        running.join()


def _swapped(events: Events, version: int, sent: float) -> Swap:
    event = events.wait("drafter_swapped", version=version)
    live = event["time"] - time.time() + time.monotonic()  # events are stamped with the wall clock
    detail = event["detail"]
    return Swap(version, Span(sent, live), detail["staging_s"], detail["flip_s"])
