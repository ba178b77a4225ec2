"""The trainer's end of the control link: publishes drafters, and hears from every server."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection

import msgspec

from tlt_server.errors import WireError
from tlt_server.wire.files import CHUNK_BYTES, digests_of
from tlt_server.wire.messages import (
    Buffer,
    Chunk,
    ChunksWanted,
    Heartbeat,
    Hello,
    Message,
    ModelIdentity,
    Offer,
    Shared,
)
from tlt_server.wire.sharing import Fetcher
from tlt_server.wire.sockets import Link
from tlt_server.wire.tree import FAN_OUT, PAYS, Member, Tree

SILENCE = 10.0
"""Seconds without a word after which a server counts as gone; it says hello every second."""
NOTICE_WITHIN = 0.02
"""Seconds until a quiet sender notices what another thread has asked of it."""
HELLOS_A_SECOND = 64
"""Of a server, which says a few."""


class Outgoing:
    """A drafter's file in chunks; `header` tells of them."""

    def __init__(self, file: bytes, version: int, trained_on: int, model: ModelIdentity, chunk_bytes: int) -> None:
        self.chunks = [memoryview(file)[start : start + chunk_bytes] for start in range(0, len(file), chunk_bytes)]
        self.header = Offer(
            version=version,
            trained_on=trained_on,
            model=model,
            size=len(file),
            chunk_bytes=chunk_bytes,
            digests=digests_of(self.chunks),
        )
        self.digest = self.header.digest


class Sender:
    """Holds the latest drafter, offers it to every server, and sends the chunks that each asks for. Where there are
    several, most are told to fetch it from others.

    All state of a transfer is the receiver's: a sender that starts anew with the same drafter goes on where it was.

    link: bound, reading `READS_TO_TRAINER`; `run` closes it.
    model: the target that the drafters are for; a server of another one is turned away.
    hear: called in `run`'s thread with a server's identity (`NAME/TOKEN`, new at each of its starts) and its hello.
        Must return soon.
    fetcher: of what servers on other machines share with their targets; None: nothing is fetched.
    fan_out, pays: as `Tree`'s.
    paced: devices on which training goes by the step times of servers there.

    dropped: messages that were neither heard nor answered with chunks. From any thread.
    """

    def __init__(
        self,
        link: Link,
        model: ModelIdentity,
        hear: Callable[[str, Hello], None],
        clock: Callable[[], float] = time.monotonic,
        chunk_bytes: int = CHUNK_BYTES,
        fetcher: Fetcher | None = None,
        fan_out: int = FAN_OUT,
        pays: int = PAYS,
        paced: Collection[str] = (),
    ) -> None:
        self.fetcher, self._paced = fetcher, paced
        self.link, self._model, self._hear = link, model, hear
        self._clock, self._chunk_bytes = clock, chunk_bytes
        self._tree = Tree(fan_out, pays, clock)
        self._hellos, self._second = Counter[bytes](), 0
        self._newest = 0
        self._pending: deque[tuple[bytes, int, int]] = deque(maxlen=1)  # written by one thread, taken by another
        self._update: Outgoing | None = None
        self._stopped = False
        self._served = self.dropped = 0

    def publish(self, version: int, trained_on: int, file: bytes) -> None:
        """From any thread, but one at a time; what was published before is sent no further.

        version: of the drafter, higher than any before.
        trained_on: the target version that it was trained on.
        file: safetensors.

        Raises WireError: the version is not higher.
        """
        if version <= self._newest:
            raise WireError(f"drafter version {version} is not higher than {self._newest}, the last one: raise it")
        self._pending.append((file, version, trained_on))
        self._newest = version

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop`, then closes the link. tick: called again and again, whether or not anything arrives."""
        try:
            while not self._stopped:
                self.step(NOTICE_WITHIN)
                tick()
        finally:
            self.link.close()

    def stop(self) -> None:
        """From any thread."""
        self._stopped = True

    def step(self, seconds: float) -> None:
        """Waits so long for a message, handles at most one."""
        self.link.wait(seconds)
        if self._pending:
            self._update = Outgoing(*self._pending.pop(), self._model, self._chunk_bytes)
            for peer in self._tree.begin(self._update.header.size):
                self._offer(peer, self._update.header)
        if (arrived := self.link.receive()) is not None:
            self._handle(*arrived)
        if self.fetcher is not None:
            self.fetcher.step(self.link)
        self.dropped = self.link.read - self._served
        now = self._clock()
        for peer in [peer for peer, member in self._tree.members.items() if now - member.heard >= SILENCE]:
            self._tree.leave(peer)

    def _handle(self, peer: bytes, message: Message, payload: Buffer) -> None:
        if isinstance(message, Hello):
            if reason := self._reason_to_reject(peer, message):
                self.link.reject(peer, reason)
            else:
                self._greet(peer, message)
        elif isinstance(message, ChunksWanted) and peer in self._tree.members:
            self._send_chunks(peer, message)
        elif isinstance(message, Shared | Chunk) and self.fetcher is not None:
            self._served += self.fetcher.hear(self.link, peer, message, payload)

    def _reason_to_reject(self, peer: bytes, hello: Hello) -> str:
        """Empty if there is none."""
        if hello.model != self._model:
            return f"this trainer's drafters are for {self._model}, not for {hello.model}"
        if not hello.server.isprintable() or peer.decode(errors="replace").rpartition("/")[0] != hello.server:
            return f"server {hello.server!r} speaks as {peer!r}: its name and a token are wanted"
        if (second := int(self._clock())) != self._second:
            self._hellos, self._second = Counter(), second
        self._hellos[peer] += 1
        return f"more than {HELLOS_A_SECOND} hellos a second" if self._hellos[peer] > HELLOS_A_SECOND else ""

    def _greet(self, peer: bytes, hello: Hello) -> None:
        self._served += 1
        is_new = peer not in self._tree.members
        self._tree.members[peer] = Member(self._clock(), hello.door, self.link.key)
        takers = self._tree.takers
        wants_times = any(device in self._paced for device in hello.devices)
        self.link.send(Heartbeat(takers=takers, wants_times=wants_times), to=peer)
        tells_door = is_new and takers and not hello.door  # with its next hello, and others may fetch from it at once
        if self._update is not None and self._update.digest != hello.offer and not tells_door:
            self._offer(peer, self._update.header)
        self._hear(peer.decode(errors="replace"), hello)

    def _offer(self, peer: bytes, header: Offer) -> None:
        self.link.send(msgspec.structs.replace(header, source=self._tree.source(peer)), to=peer)

    def _send_chunks(self, peer: bytes, wanted: ChunksWanted) -> None:
        update = self._update
        if update is None or wanted.digest != update.digest:
            return  # of a drafter before this one, or of an earlier life: the offer of this one is on its way
        self._served += 1
        self._tree.failed(peer)
        for index, chunk in enumerate(update.chunks[wanted.start : wanted.stop], wanted.start):
            self.link.send(Chunk(digest=update.digest, index=index), chunk, to=peer)
