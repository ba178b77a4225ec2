"""A server's end of the control link: says what the server does, fetches drafters into a folder, and passes them on."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from tlt_client import DrafterTrainer, DrafterUpdate
from tlt_client.schemas import DrafterVersion

from tlt_server.errors import ConfigError, WireError
from tlt_server.wire.files import CHUNK_BYTES, MAX_DAMAGED, Incoming
from tlt_server.wire.live import Giver
from tlt_server.wire.messages import (
    MAX_REASON,
    Buffer,
    Chunk,
    ChunksWanted,
    Heartbeat,
    Hello,
    LiveWanted,
    Offer,
    SharedWanted,
)
from tlt_server.wire.passing import Peers
from tlt_server.wire.sharing import Sharer
from tlt_server.wire.sockets import TRAINER, Link

HELLO_EVERY, SILENCE = 1.0, 3.0
"""Seconds: between hellos; without a word, until the trainer is away."""
LOOK_EVERY = 0.05
"""Seconds until what is due is done, while nothing arrives."""
PARTIAL, WHOLE = "*.partial", "drafter-*.safetensors"


class Receiver:
    """A drafter under way is a `.partial` file; whole and verified, it is `drafter-VERSION.safetensors`, and replaces
    the one before: an open file stays readable, and whoever is too late to open one has been told of a newer.

    link: to the trainer, reading `READS_TO_SERVER`; `close` closes it.
    hello: the server's state now; `change` tells of another.
    folder: this receiver's alone, best in memory (/dev/shm); made if it is not there.
    most: bytes that a drafter may have; None: as many as there is room for. chunk_bytes: of what is shared from here.

    told: to be set; called with each drafter that lies whole and verified at its path, until a newer one does, and
        with each change of how the link stands.
    wants_times: whether the trainer wants to know what decode steps take, as it said last.

    Raises ConfigError: the folder cannot be used, or another receiver uses it.
    """

    def __init__(
        self,
        link: Link,
        hello: Hello,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        most: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.hello = hello
        self.told: Callable[[DrafterUpdate | DrafterTrainer], object] = lambda _: None
        self.wants_times = False
        self._link, self._folder, self._clock, self._most = link, folder, clock, most
        self._lock = lock_folder(folder)
        self._remove(WHOLE)  # an earlier life's: nobody was told of them in this one
        self._sharer, self._giver = Sharer(link, chunk_bytes), Giver(link, chunk_bytes)
        self._update: Offer | None = None
        self._incoming: Incoming | None = None
        self._peers = Peers(link, hello.server, folder, clock)
        self._received: bytes | None = None
        self._given_up: bytes | None = None
        self._hello_due = 0.0
        self._heard = -SILENCE
        self._trainer = DrafterTrainer(address=link.address, connected=False)

    async def run(self) -> None:
        """Until it is cancelled, or an exception."""
        while True:
            await self._link.arrival(LOOK_EVERY, *self._peers.links)
            self.step()

    def step(self) -> None:
        """Handles a message that has arrived on each link, if there is one, and does what is due."""
        if (arrived := self._link.receive()) is not None:
            if not self._trainer.connected and self.hello.offer == self._given_up:
                self.hello = msgspec.structs.replace(self.hello, offer=None)  # there may be room for it by now
            self._heard = self._clock()
            self._hear(*arrived[1:])
        if (passed := self._peers.receive()) is not None:
            self._hear(*passed)
        now = self._clock()
        if now >= self._hello_due:
            self.change()
        is_heard = now - self._heard < SILENCE
        if self._incoming is not None and (is_heard or self._peers.has_source):
            self._ask(self._incoming)
        self._peers.give()
        self._sharer.step(self.hello)
        self._giver.step()
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

    def gives(self, *drafters: DrafterVersion) -> None:
        """What a trainer may begin with: the active drafter, then others, the one of the server's start last."""
        self._giver.drafters = drafters

    def close(self) -> None:
        """Removes the files, leaves the folder to others, and closes the link."""
        self._remove(PARTIAL)
        self._remove(WHOLE)
        os.close(self._lock)
        self._sharer.close()
        self._giver.close()
        self._peers.close()
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
            elif isinstance(message, Heartbeat):
                self.wants_times = message.wants_times
                if (door := self._peers.let_in(message.takers)) != self.hello.door:
                    self.change(door=door)
            if isinstance(message, SharedWanted | ChunksWanted):
                self._sharer.hear(message, self.hello)
            if isinstance(message, LiveWanted | ChunksWanted):
                self._giver.hear(message)
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
        if self._incoming is not None and self._update is not None and update.version < self._update.version:
            return f"version {update.version} is older than {self._update.version}, which is arriving"
        return ""

    def _begin(self, update: Offer) -> None:
        self._update, self._incoming = update, (incoming := Incoming(update, self._folder))
        self._remove(PARTIAL, keep=incoming.path)
        incoming.resume()
        free = shutil.disk_usage(self._folder).free
        if incoming.missing > free:
            self._give_up(f"{self._folder} has {free} bytes free, {incoming.missing} are missing: make room")
        else:
            self._peers.begin(incoming, update.source)
            self._go_on(incoming)

    def _go_on(self, incoming: Incoming) -> None:
        """Asks for more, or ends where nothing is missing."""
        if incoming.missing:
            self._ask(incoming)
        else:
            self._finish(incoming)

    def _ask(self, incoming: Incoming) -> None:
        if (wanted := incoming.wanted(self._clock())) is not None and not self._peers.ask(wanted):
            incoming.again()

    def _add(self, chunk: Chunk, payload: Buffer) -> None:
        incoming = self._incoming
        if incoming is None or (chunk.digest, chunk.index) != (incoming.digest, incoming.next):
            return  # of an update that was superseded while it was under way, or after a loss
        try:
            incoming.add(payload, self._clock())
        except WireError as error:
            if self._peers.has_source:
                self._peers.leave_source(str(error))
                incoming.damaged = 0
            else:
                self._link.reject(TRAINER, str(error))
            if incoming.damaged == MAX_DAMAGED:
                self._give_up(f"{error}, {MAX_DAMAGED} times")
                return
        else:
            self._peers.gave(len(payload))
        self._go_on(incoming)

    def _finish(self, incoming: Incoming) -> None:
        update = self._update
        assert update is not None
        path = incoming.path = incoming.path.rename(self._folder / f"drafter-{update.version}.safetensors")
        self._remove(WHOLE, keep=path)
        self._peers.leave_source()
        self._incoming, self._received = None, incoming.digest
        self.change(newest_drafter=update.version)
        self._report(received=update.version)
        self.told(DrafterUpdate(str(path), update.version, update.trained_on))

    def _give_up(self, reason: str) -> None:
        incoming, update = self._incoming, self._update
        assert incoming is not None
        assert update is not None
        incoming.path.unlink(missing_ok=True)
        self._incoming, self._given_up = None, incoming.digest
        self._peers.end()
        self._refuse(update, reason)

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
