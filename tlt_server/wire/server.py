"""A server's end of the control link: says what the server does, and fetches drafters into a folder."""

import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from tlt_server.errors import ConfigError, WireError
from tlt_server.wire.messages import (
    MAX_CHUNKS_WANTED,
    Buffer,
    ChunksWanted,
    DrafterChunk,
    DrafterReceived,
    DrafterRefused,
    DrafterSwapped,
    DrafterUpdate,
    Hello,
    Load,
    Message,
    Notice,
    TargetPublished,
    TargetShared,
)
from tlt_server.wire.sockets import TRAINER, Link
from tlt_server.wire.update import Incoming

HELLO_EVERY = ASK_AGAIN = 1.0
SILENCE = 3.0
"""Seconds: between hellos; without a chunk, until it is asked for again; without a word, until the trainer is away."""
NOTICE_WITHIN = 0.05
"""Seconds until a notice of the server's is sent."""
WINDOW = MAX_CHUNKS_WANTED
"""Chunks asked for ahead, half of them at a time: 8 MiB under way, however slow this side is."""
MAX_DAMAGED = 3
"""Chunks damaged one after another, after which it is not the line."""
PARTIAL, WHOLE = "*.partial", "drafter-*.safetensors"


class DrafterReady(NamedTuple):
    """A drafter lies whole and verified at `path`, until a newer one does."""

    version: int
    trained_on: int
    path: str


class TrainerLink(NamedTuple):
    """Whether a trainer answers; messages rejected since the start."""

    connected: bool
    rejected: int


Told: TypeAlias = DrafterReady | DrafterRefused | TrainerLink


class Receiver:
    """A drafter under way is a `.partial` file; whole and verified, it is `drafter-VERSION.safetensors`, and replaces
    the one before: an open file stays readable, and whoever is too late to open one has been told of a newer.

    Args:
        link: to the trainer, reading `READS_TO_SERVER`; `run` closes it.
        hello: the server's state now; from here on it follows from the notices.
        folder: this receiver's alone, best in memory (/dev/shm); made if it is not there.
        told: called in `run`'s thread.
        most: bytes that a drafter may have; None: as many as there is room for.

    Raises:
        ConfigError: the folder cannot be used, or another receiver uses it.
    """

    def __init__(
        self,
        link: Link,
        hello: Hello,
        folder: Path,
        told: Callable[[Told], None],
        clock: Callable[[], float] = time.monotonic,
        most: int | None = None,
    ) -> None:
        self._link, self._hello, self._folder = link, hello, folder
        self._told, self._clock, self._most = told, clock, most
        self._lock = lock_folder(folder)
        self._remove(WHOLE)  # an earlier life's: nobody was told of them in this one
        self._notices: deque[Notice] = deque()  # written by one thread, taken by another
        self._unsent: deque[Message] = deque(maxlen=256)
        self._incoming: Incoming | None = None
        self._received: bytes | None = None
        self._hello_due = self._ask_due = 0.0
        self._heard = -SILENCE
        self._state: TrainerLink | None = None
        self._stopped = False

    def tell(self, notice: Notice) -> None:
        """From any thread."""
        self._notices.append(notice)

    def stop(self) -> None:
        """From any thread."""
        self._stopped = True

    def run(self) -> None:
        """Until `stop`, or an exception; leaves no file behind."""
        try:
            while not self._stopped:
                self.step(NOTICE_WITHIN)
        finally:
            self.close()
            self._link.close()

    def step(self, seconds: float) -> None:
        """Waits so long for a message, handles at most one, and does what is due."""
        self._link.wait(seconds)
        while self._notices:
            self._note(self._notices.popleft())
        if (arrived := self._link.receive()) is not None:
            self._heard = self._clock()
            self._hear(*arrived[1:])
        self._do_what_is_due(self._clock())

    def close(self) -> None:
        """Removes the files, and leaves the folder to others."""
        if self._incoming is not None:
            self._incoming.drop()
        self._remove(PARTIAL)
        self._remove(WHOLE)
        os.close(self._lock)

    # -- what the server says -----------------------------------------------------------------------------------------

    def _note(self, notice: Notice) -> None:
        match notice:
            case Load():
                self._link.send(notice)
                return
            case TargetPublished(target_version=version, weight_version=name):
                self._change(target_version=version, weight_version=name, shared="")
            case TargetShared(target_version=version, path=path) if version == self._hello.target_version:
                self._change(shared=path)
            case DrafterSwapped(version=version, drafter_version=active):
                self._change(drafter_version=active, newest_drafter=max(version, self._hello.newest_drafter))
        self._unsent.append(notice)
        self._hello_due = 0.0

    def _change(self, **state: object) -> None:
        self._hello = msgspec.structs.replace(self._hello, **state)

    def _do_what_is_due(self, now: float) -> None:
        if now >= self._hello_due and self._link.send(self._hello):
            self._hello_due = now + HELLO_EVERY
            while self._unsent and self._link.send(self._unsent[0]):  # before a hello they would not be heard
                self._unsent.popleft()
        state = TrainerLink(now - self._heard < SILENCE, self._link.rejected.total())
        if self._incoming is not None and state.connected and now >= self._ask_due:
            self._ask(self._incoming, self._incoming.next)
        if state != self._state:
            self._state = state
            self._told(state)

    # -- what the trainer says ----------------------------------------------------------------------------------------

    def _hear(self, message: Message, payload: Buffer) -> None:
        try:
            if isinstance(message, DrafterUpdate):
                self._consider(message)
            elif isinstance(message, DrafterChunk):
                self._add(message, payload)
        except OSError as error:
            self._give_up(f"cannot write to {self._folder}: {error.strerror}")

    def _consider(self, update: DrafterUpdate) -> None:
        """An offer, which may be repeated, outdated, or in the middle of another's transfer."""
        if self._incoming is not None and update.digest == self._incoming.digest:
            return
        if reason := self._reason_to_refuse(update):
            self._refuse(update.version, reason)
        elif update.version == self._hello.newest_drafter:
            self._link.send(DrafterReceived(version=update.version))
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
        free = shutil.disk_usage(self._folder).free
        if incoming.missing > free:
            self._give_up(f"{self._folder} has {free} bytes free, {incoming.missing} are missing: make room")
        elif not incoming.missing:
            self._finish(incoming)
        else:
            self._ask(incoming, incoming.next)

    def _ask(self, incoming: Incoming, start: int) -> None:
        self._ask_due = self._clock() + ASK_AGAIN
        incoming.asked = min(incoming.next + WINDOW, incoming.header.chunks)
        if start < incoming.asked:
            self._link.send(ChunksWanted(digest=incoming.digest, start=start, stop=incoming.asked))

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
        incoming.damaged = 0
        self._ask_due = self._clock() + ASK_AGAIN
        if not incoming.missing:
            self._finish(incoming)
        elif incoming.asked - incoming.next <= WINDOW // 2:
            self._ask(incoming, incoming.asked)

    def _damage(self, incoming: Incoming, reason: str) -> None:
        self._link.reject(TRAINER, reason)
        incoming.damaged += 1
        if incoming.damaged == MAX_DAMAGED:
            self._give_up(f"{reason}, {MAX_DAMAGED} times")
        else:
            self._ask(incoming, incoming.next)

    def _finish(self, incoming: Incoming) -> None:
        update = incoming.header
        path = self._folder / f"drafter-{update.version}.safetensors"
        incoming.finish(path)
        self._remove(WHOLE, keep=path)
        self._incoming, self._received = None, incoming.digest
        self._change(newest_drafter=update.version)
        self._told(DrafterReady(update.version, update.trained_on, str(path)))
        self._link.send(DrafterReceived(version=update.version))

    def _give_up(self, reason: str) -> None:
        assert self._incoming is not None
        version = self._incoming.header.version
        self._incoming.drop()
        self._incoming = None
        self._refuse(version, reason)

    def _refuse(self, version: int, reason: str) -> None:
        refused = DrafterRefused(version=version, reason=reason)
        self._told(refused)
        self._link.send(refused)

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
