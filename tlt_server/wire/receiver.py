"""The server's end of the control link, in a process of its own: 0.5 GB are received and hashed beside decoding."""

import contextlib
import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tlt_server.errors import ConfigError, WireError
from tlt_server.wire.addresses import CurveKeys
from tlt_server.wire.messages import (
    MAX_CHUNKS_WANTED,
    READS_NOTICES,
    READS_TO_SERVER,
    Buffer,
    ChunksWanted,
    DrafterChunk,
    DrafterReady,
    DrafterReceived,
    DrafterRefused,
    DrafterSwapped,
    DrafterUpdate,
    Hello,
    Load,
    Message,
    TargetPublished,
    TargetShared,
    TrainerLink,
    decode,
    encode,
)
from tlt_server.wire.sockets import TRAINER, Link
from tlt_server.wire.update import Incoming

HELLO_EVERY = 1.0
ASK_AGAIN = 1.0
SILENCE = 3.0
"""Seconds: between hellos; without a chunk, until it is asked for again; without a word, until the trainer is away."""

WINDOW = MAX_CHUNKS_WANTED
"""Chunks asked for ahead, half of them at a time: 8 MiB under way, however slow this side is."""

PARTIAL, WHOLE = "*.partial", "drafter-*.safetensors"

MAX_DAMAGED = 3
"""Chunks damaged one after another, after which it is not the line."""


def receive(
    address: str,
    server: Connection,
    hello: Hello,
    folder: Path,
    *,
    curve: CurveKeys | None = None,
    most: int | None = None,
) -> None:
    """A receiver from beginning to end, for one thread; returns when the server's end of the pipe is closed.

    most: as for `Receiver`.

    Raises:
        ConfigError: the address, the keys or the folder cannot be used.
    """
    link = Link(address, READS_TO_SERVER, hello.server, curve)
    try:
        Receiver(link, server, hello, folder, most=most).run()
    finally:
        link.close()


class Receiver:
    """Says hello to the trainer, passes on what the server has to tell it, and fetches drafters into a folder.

    A drafter under way is a `.partial` file; whole and verified, it is `drafter-VERSION.safetensors`, and replaces the
    one before. An open file stays readable then; one that is opened too late is gone, and a newer one has been told of.

    Args:
        trainer: the link.
        server: the server's pipe: encoded notices come in, `READS_FROM_RECEIVER` go out.
        hello: the server's state now; from here on it follows from the notices.
        folder: this receiver's alone, best in memory (/dev/shm); made if it is not there.
        most: bytes that a drafter may have; None: as many as there is room for.

    Raises:
        ConfigError: the folder cannot be used, or another receiver uses it.
    """

    def __init__(
        self,
        trainer: Link,
        server: Connection,
        hello: Hello,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        most: int | None = None,
    ) -> None:
        self._trainer = trainer
        self._server = server
        self._hello = hello
        self._folder = folder
        self._clock, self._most = clock, most
        self._lock = lock_folder(folder)
        self._remove(WHOLE)  # an earlier life's: nobody was told of them in this one
        self._to_server: deque[Message] = deque()
        self._to_trainer: deque[Message] = deque(maxlen=256)
        self._incoming: Incoming | None = None
        self._received: bytes | None = None
        self._asked_up_to = self._damaged = 0
        self._hello_due = self._ask_due = 0.0
        self._heard = -SILENCE
        self._told: TrainerLink | None = None
        trainer.watch(server.fileno())

    def run(self) -> None:
        """Until the server's end of the pipe is closed, or an exception; leaves no file behind."""
        try:
            with contextlib.suppress(EOFError, ConnectionError):  # the pipe's: a link has no such errors
                while True:
                    self.step(HELLO_EVERY / 4)
        finally:
            self.close()

    def step(self, seconds: float) -> None:
        """Waits so long for a message, handles at most one of each side, and does what is due.

        Raises:
            EOFError, ConnectionError: the server is gone.
        """
        self._trainer.wait(seconds)
        if self._server.poll():
            self._hear_server(decode([self._server.recv_bytes()], READS_NOTICES)[0])
        if (arrived := self._trainer.receive()) is not None:
            self._heard = self._clock()
            self._hear_trainer(*arrived[1:])
        self._do_what_is_due()

    def close(self) -> None:
        """Removes the files, and leaves the folder to others."""
        if self._incoming is not None:
            self._incoming.drop()
        self._remove(PARTIAL)
        self._remove(WHOLE)
        os.close(self._lock)

    # -- what the server says -----------------------------------------------------------------------------------------

    def _hear_server(self, notice: Message) -> None:
        match notice:
            case Load():
                self._trainer.send(notice)
                return
            case TargetPublished(target_version=version, weight_version=name):
                self._change(target_version=version, weight_version=name, shared="")
            case TargetShared(target_version=version, path=path) if version == self._hello.target_version:
                self._change(shared=path)
            case DrafterSwapped(version=version, drafter_version=in_force):
                self._change(drafter_version=in_force, newest_drafter=max(version, self._hello.newest_drafter))
        self._to_trainer.append(notice)
        self._hello_due = 0.0

    def _change(self, **state: object) -> None:
        self._hello = msgspec.structs.replace(self._hello, **state)

    def _do_what_is_due(self) -> None:
        now = self._clock()
        if now >= self._hello_due and self._trainer.send(self._hello):
            self._hello_due = now + HELLO_EVERY
            while self._to_trainer and self._trainer.send(self._to_trainer[0]):  # a stranger's would not be heard
                self._to_trainer.popleft()
        connected = now - self._heard < SILENCE
        if self._incoming is not None and connected and now >= self._ask_due:
            self._ask(self._incoming, self._incoming.next, WINDOW)
        state = TrainerLink(connected=connected, rejected=self._trainer.rejected.total())
        if state != self._told:
            self._told = state
            self._to_server.append(state)
        while self._to_server:
            self._server.send_bytes(encode(self._to_server.popleft()))

    # -- what the trainer says ----------------------------------------------------------------------------------------

    def _hear_trainer(self, message: Message, payload: Buffer) -> None:
        try:
            if isinstance(message, DrafterUpdate):
                self._consider(message)
            elif isinstance(message, DrafterChunk):
                self._add(message, payload)
        except OSError as error:
            self._give_up(f"cannot write to {self._folder}: {error.strerror}")

    def _consider(self, update: DrafterUpdate) -> None:
        """An offer, which may be repeated, outdated, or in the middle of another's transfer."""
        under_way = self._incoming
        if under_way is not None and update.digest == under_way.digest:
            return
        if reason := self._reason_to_refuse(update):
            self._refuse(update.version, reason)
        elif update.version == self._hello.newest_drafter:
            self._trainer.send(DrafterReceived(version=update.version))
        else:
            self._begin(update)

    def _reason_to_refuse(self, update: DrafterUpdate) -> str:
        """Empty if there is none."""
        newest = self._hello.newest_drafter
        if update.model != self._hello.model:
            return f"it is for {update.model}; this server's target is {self._hello.model}"
        if self._most is not None and update.size > self._most:
            return f"it has {update.size} bytes, and one of this server's drafter {self._most} at most"
        if update.version < newest:
            return f"version {update.version} is older than {newest}, which this server was given: raise the version"
        if update.version == newest and self._received not in {None, update.digest}:
            return f"version {newest} came before with other contents: raise the version"
        if self._incoming is not None and update.version < self._incoming.header.version:
            return f"version {update.version} is older than {self._incoming.header.version}, which is arriving"
        return ""

    def _begin(self, update: DrafterUpdate) -> None:
        if self._incoming is not None:
            self._incoming.drop()
        self._incoming = incoming = Incoming(update, self._folder)
        self._remove(PARTIAL, keep=incoming.path)
        incoming.resume()
        self._damaged = 0
        free = shutil.disk_usage(self._folder).free
        if incoming.missing > free:
            self._give_up(f"{self._folder} has {free} bytes free, {incoming.missing} are missing: make room")
        elif not incoming.missing:
            self._finish(incoming)
        else:
            self._ask(incoming, incoming.next, WINDOW)

    def _ask(self, incoming: Incoming, start: int, chunks: int) -> None:
        self._ask_due = self._clock() + ASK_AGAIN
        self._asked_up_to = min(start + chunks, incoming.header.chunks)
        if start < self._asked_up_to:
            self._trainer.send(ChunksWanted(digest=incoming.digest, start=start, stop=self._asked_up_to))

    def _add(self, chunk: DrafterChunk, payload: Buffer) -> None:
        incoming = self._incoming
        if incoming is None or chunk.digest != incoming.digest:
            return  # of an update that was superseded while it was under way
        try:
            if not incoming.add(chunk.index, payload):
                return
        except WireError as error:
            self._damage(incoming, str(error))
            return
        self._damaged = 0
        self._ask_due = self._clock() + ASK_AGAIN
        if not incoming.missing:
            self._finish(incoming)
        elif self._asked_up_to - incoming.next <= WINDOW // 2:
            self._ask(incoming, self._asked_up_to, WINDOW // 2)

    def _damage(self, incoming: Incoming, reason: str) -> None:
        self._trainer.reject(TRAINER, reason)
        self._damaged += 1
        if self._damaged == MAX_DAMAGED:
            self._give_up(f"{reason}, {MAX_DAMAGED} times")
        else:
            self._ask(incoming, incoming.next, WINDOW)

    def _finish(self, incoming: Incoming) -> None:
        update = incoming.header
        path = self._folder / f"drafter-{update.version}.safetensors"
        incoming.finish(path)
        self._remove(WHOLE, keep=path)
        self._incoming, self._received = None, incoming.digest
        self._change(newest_drafter=update.version)
        self._to_server.append(DrafterReady(version=update.version, trained_on=update.trained_on, path=str(path)))
        self._trainer.send(DrafterReceived(version=update.version))

    def _give_up(self, reason: str) -> None:
        assert self._incoming is not None
        version = self._incoming.header.version
        self._incoming.drop()
        self._incoming = None
        self._refuse(version, reason)

    def _refuse(self, version: int, reason: str) -> None:
        refused = DrafterRefused(version=version, reason=reason)
        self._to_server.append(refused)
        self._trainer.send(refused)

    def _remove(self, pattern: str, keep: Path | None = None) -> None:
        for path in self._folder.glob(pattern):
            if path != keep:
                path.unlink()


def lock_folder(folder: Path) -> int:
    """Makes the folder and locks it, until the file descriptor that is returned is closed, or the process ends.

    Raises:
        ConfigError: it cannot be made, or another receiver uses it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"drafter folder {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"drafter folder {folder} is another receiver's: give each server its own") from error
    return descriptor
