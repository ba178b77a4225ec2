"""A server's end of the control link: says what the server does, and fetches drafters into a folder."""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from tlt_client import DrafterTrainer, DrafterUpdate

from tlt_server.errors import ConfigError, WireError
from tlt_server.wire.messages import MAX_CHUNKS_WANTED, MAX_REASON, Buffer, Chunk, ChunksWanted, Hello, Offer
from tlt_server.wire.sockets import TRAINER, Link

HELLO_EVERY = ASK_AGAIN = 1.0
SILENCE = 3.0
"""Seconds: between hellos; without a chunk, until it is asked for again; without a word, until the trainer is away."""
LOOK_EVERY = 0.05
"""Seconds until what is due is done, while nothing arrives."""
WINDOW = MAX_CHUNKS_WANTED
"""Chunks asked for ahead, half of them at a time: 8 MiB under way, however slow this side is."""
MAX_DAMAGED = 3
"""Chunks damaged one after another, after which it is not the line."""
PARTIAL, WHOLE = "*.partial", "drafter-*.safetensors"


class Incoming:
    """A drafter on its way: a file, named by its digest, that grows by one verified chunk after another; a later life
    of the receiver goes on with it. Methods raise OSError where the disk does.

    next: the chunk that is due. asked: the first that was not asked for yet. damaged: chunks, one after another.
    """

    def __init__(self, header: Offer, folder: Path) -> None:
        self.header, self.digest = header, header.digest
        self.path = folder / f"{self.digest.hex()[:16]}.partial"
        self.next = self.asked = self.damaged = 0

    @property
    def missing(self) -> int:
        """Bytes."""
        return max(self.header.size - self.next * self.header.chunk_bytes, 0)

    def resume(self) -> None:
        """Makes the file, or keeps of it the chunks that are good."""
        with self.path.open("a+b") as file:
            file.seek(0)
            while self.missing and self._is_next(file.read(self.header.chunk_bytes)):
                self.next += 1
            file.truncate(min(self.next * self.header.chunk_bytes, self.header.size))
        self.asked = self.next

    def add(self, chunk: Buffer) -> None:
        """Appends the chunk that is due. WireError: it is not what the sender said it would be."""
        if not self._is_next(chunk):
            self.damaged, self.asked = self.damaged + 1, self.next
            raise WireError(f"chunk {self.next} of drafter {self.header.version} was damaged: its sha256 is wrong")
        with self.path.open("r+b") as file:
            file.seek(self.next * self.header.chunk_bytes)
            file.write(chunk)
        self.next, self.damaged = self.next + 1, 0

    def _is_next(self, chunk: Buffer) -> bool:
        return hashlib.sha256(chunk).digest() == self.header.digests[32 * self.next : 32 * (self.next + 1)]


class Receiver:
    """A drafter under way is a `.partial` file; whole and verified, it is `drafter-VERSION.safetensors`, and replaces
    the one before: an open file stays readable, and whoever is too late to open one has been told of a newer.

    link: to the trainer, reading `READS_TO_SERVER`; `close` closes it.
    hello: the server's state now; `change` tells of another.
    folder: this receiver's alone, best in memory (/dev/shm); made if it is not there.
    most: bytes that a drafter may have; None: as many as there is room for.

    told: to be set; called with each drafter that lies whole and verified at its path, until a newer one does, and
        with each change of how the link stands.

    Raises ConfigError: the folder cannot be used, or another receiver uses it.
    """

    def __init__(
        self,
        link: Link,
        hello: Hello,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        most: int | None = None,
    ) -> None:
        self.hello = hello
        self.told: Callable[[DrafterUpdate | DrafterTrainer], object] = lambda _: None
        self._link, self._folder, self._clock, self._most = link, folder, clock, most
        self._lock = lock_folder(folder)
        self._remove(WHOLE)  # an earlier life's: nobody was told of them in this one
        self._incoming: Incoming | None = None
        self._received: bytes | None = None
        self._given_up: bytes | None = None
        self._hello_due = self._ask_due = 0.0
        self._heard = -SILENCE
        self._trainer = DrafterTrainer(address=link.address, connected=False)

    async def run(self) -> None:
        """Until it is cancelled, or an exception."""
        while True:
            await self._link.arrival(LOOK_EVERY)
            self.step()

    def step(self) -> None:
        """Handles a message that has arrived, if there is one, and does what is due."""
        if (arrived := self._link.receive()) is not None:
            if not self._trainer.connected and self.hello.offer == self._given_up:
                self.hello = msgspec.structs.replace(self.hello, offer=None)  # there may be room for it by now
            self._heard = self._clock()
            self._hear(*arrived[1:])
        now = self._clock()
        if now >= self._hello_due:
            self.change()
        is_heard = now - self._heard < SILENCE
        if self._incoming is not None and is_heard and now >= self._ask_due:
            self._incoming.asked = self._incoming.next
            self._go_on(self._incoming)
        self._report(connected=is_heard)

    def change(self, **state: object) -> None:
        """Fields of the hello, which is sent at once, or as soon as there is a trainer."""
        self.hello = msgspec.structs.replace(self.hello, **state)
        self._hello_due = self._clock() + HELLO_EVERY if self._link.send(self.hello) else 0.0
        self.hello = msgspec.structs.replace(self.hello, load=None)

    def settle(self, version: int, reason: str = "", **state: object) -> None:
        """It is known what became of a drafter. reason: why it is not active."""
        reason = f"drafter {version}: {reason}"[:MAX_REASON] if reason else ""
        self.change(settled_drafter=max(version, self.hello.settled_drafter), reason=reason, **state)

    def close(self) -> None:
        """Removes the files, leaves the folder to others, and closes the link."""
        self._remove(PARTIAL)
        self._remove(WHOLE)
        os.close(self._lock)
        self._link.close()

    def _report(self, **changes: object) -> None:
        before, self._trainer = self._trainer, msgspec.structs.replace(self._trainer, **changes)
        if self._trainer != before:
            self.told(self._trainer)

    # -- what the trainer says ----------------------------------------------------------------------------------------

    def _hear(self, message: object, payload: Buffer) -> None:
        try:
            if isinstance(message, Offer):
                self._consider(message)
            elif isinstance(message, Chunk):
                self._add(message, payload)
        except OSError as error:
            self._give_up(f"cannot write to {self._folder}: {error.strerror}")

    def _consider(self, update: Offer) -> None:
        """An offer, which may be repeated, outdated, or in the middle of another's transfer."""
        if (digest := update.digest) == self.hello.offer:
            return
        if reason := self._reason_to_refuse(update, digest):
            self._refuse(update, reason)
            return
        self.change(offer=digest)
        if update.version > self.hello.newest_drafter:
            self._begin(update)

    def _reason_to_refuse(self, update: Offer, digest: bytes) -> str:
        """Empty if there is none."""
        newest = self.hello.newest_drafter
        if update.model != self.hello.model:
            return f"it is for {update.model}; this server's target is {self.hello.model}"
        if self._most is not None and update.size > self._most:
            return f"it has {update.size} bytes, and one of this server's drafter {self._most} at most"
        if update.version < newest:
            return f"version {update.version} is older than {newest}, which this server was given: raise the version"
        if update.version == newest and self._received not in {None, digest}:
            return f"version {newest} came before with other contents: raise the version"
        if self._incoming is not None and update.version < self._incoming.header.version:
            return f"version {update.version} is older than {self._incoming.header.version}, which is arriving"
        return ""

    def _begin(self, update: Offer) -> None:
        self._incoming = incoming = Incoming(update, self._folder)
        self._remove(PARTIAL, keep=incoming.path)
        incoming.resume()
        free = shutil.disk_usage(self._folder).free
        if incoming.missing > free:
            self._give_up(f"{self._folder} has {free} bytes free, {incoming.missing} are missing: make room")
        else:
            self._go_on(incoming)

    def _go_on(self, incoming: Incoming) -> None:
        """Asks for more once half of what was asked for is here; ends where nothing is missing."""
        self._ask_due = self._clock() + ASK_AGAIN
        if not incoming.missing:
            self._finish(incoming)
        elif incoming.asked - incoming.next <= WINDOW // 2:
            start, incoming.asked = incoming.asked, min(incoming.next + WINDOW, incoming.header.chunks)
            if start < incoming.asked:
                self._link.send(ChunksWanted(digest=incoming.digest, start=start, stop=incoming.asked))

    def _add(self, chunk: Chunk, payload: Buffer) -> None:
        incoming = self._incoming
        if incoming is None or (chunk.digest, chunk.index) != (incoming.digest, incoming.next):
            return  # of an update that was superseded while it was under way, or after a loss
        try:
            incoming.add(payload)
        except WireError as error:
            self._link.reject(TRAINER, str(error))
            if incoming.damaged == MAX_DAMAGED:
                self._give_up(f"{error}, {MAX_DAMAGED} times")
                return
        self._go_on(incoming)

    def _finish(self, incoming: Incoming) -> None:
        update = incoming.header
        path = incoming.path.rename(self._folder / f"drafter-{update.version}.safetensors")
        self._remove(WHOLE, keep=path)
        self._incoming, self._received = None, incoming.digest
        self.change(newest_drafter=update.version)
        self._report(received=update.version)
        self.told(DrafterUpdate(str(path), update.version, update.trained_on))

    def _give_up(self, reason: str) -> None:
        incoming = self._incoming
        assert incoming is not None
        incoming.path.unlink(missing_ok=True)
        self._incoming, self._given_up = None, incoming.digest
        self._refuse(incoming.header, reason)

    def _refuse(self, update: Offer, reason: str) -> None:
        self._report(refused=update.version, reason=reason)
        self.settle(update.version, reason, offer=update.digest)

    def _remove(self, pattern: str, keep: Path | None = None) -> None:
        for path in self._folder.glob(pattern):
            if path != keep:
                path.unlink()


def lock_folder(folder: Path) -> int:
    """Makes the folder and locks it, until the file descriptor that is returned is closed, or the process ends.

    Raises ConfigError: it cannot be made, or another receiver uses it.
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
