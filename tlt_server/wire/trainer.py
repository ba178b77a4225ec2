"""The trainer's end of the control link: publishes drafters, and hears from every server."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tlt_server.errors import WireError
from tlt_server.wire.messages import (
    ChunksWanted,
    DrafterChunk,
    DrafterReceived,
    DrafterRefused,
    Heartbeat,
    Hello,
    Message,
    ModelIdentity,
)
from tlt_server.wire.sockets import Link
from tlt_server.wire.update import Outgoing

SILENCE = 10.0
"""Seconds without a word after which a server counts as gone; it says hello every second."""
NOTICE_WITHIN = 0.02
"""Seconds until a quiet sender notices what another thread has asked of it."""
MAX_SERVERS = 256
"""At once; a hello of one more is rejected."""
MESSAGES_A_SECOND, MESSAGES_AT_ONCE = 64, 512
"""Of a server, but for chunks that it asks for: it says a few a second, and after a cut what it could not say."""
CHUNK_BYTES = 2 << 20
"""Between 1 and 4 MiB ZMQ is fastest; a larger one makes other messages wait longer."""


@dataclass
class _Server:
    """heard: when. settled: the highest version that it received or refused. allowance: of messages, at `counted`."""

    heard: float
    counted: float
    settled: int = 0
    allowance: float = MESSAGES_AT_ONCE

    def may_speak(self, now: float) -> bool:
        """Counts a message."""
        more = (now - self.counted) * MESSAGES_A_SECOND
        self.allowance, self.counted = min(self.allowance + more, MESSAGES_AT_ONCE), now
        self.allowance -= self.allowance >= 1
        return self.allowance >= 1


class Sender:
    """Holds the latest drafter, offers it to every server, and sends the chunks that each asks for.

    All state of a transfer is the receiver's: a sender that starts anew with the same drafter goes on where it was.

    Args:
        link: bound, reading `READS_TO_TRAINER`; `run` closes it.
        model: the target that the drafters are for; a server of another one is turned away.
        hear: called in `run`'s thread with a server's identity (`NAME/TOKEN`, new at each of its starts) and its
            message: `Hello`, a notice, or what became of an update. Must return soon.

    Attributes:
        dropped: messages that were neither heard nor answered with chunks. From any thread.
    """

    def __init__(
        self,
        link: Link,
        model: ModelIdentity,
        hear: Callable[[str, Message], None],
        clock: Callable[[], float] = time.monotonic,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._link, self._model, self._hear = link, model, hear
        self._clock, self._chunk_bytes = clock, chunk_bytes
        self._servers: dict[bytes, _Server] = {}
        self._newest = 0
        self._pending: deque[tuple[bytes, int, int]] = deque(maxlen=1)  # written by one thread, taken by another
        self._update: Outgoing | None = None
        self._stopped = False
        self._served = self.dropped = 0

    @property
    def cut(self) -> int:
        """Connections until now. From any thread."""
        return self._link.cut

    def publish(self, version: int, trained_on: int, file: bytes) -> None:
        """From any thread, but one at a time; what was published before is sent no further.

        Args:
            version: of the drafter, higher than any before.
            trained_on: the target version that it was trained on.
            file: safetensors.

        Raises:
            WireError: the version is not higher.
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
            self._link.close()

    def stop(self) -> None:
        """From any thread."""
        self._stopped = True

    def step(self, seconds: float) -> None:
        """Waits so long for a message, handles at most one."""
        self._link.wait(seconds)
        if self._pending:
            self._update = Outgoing(*self._pending.pop(), self._model, self._chunk_bytes)
            for peer in self._servers:
                self._offer(peer)
        if (arrived := self._link.receive()) is not None:
            self._handle(*arrived[:2])
        self.dropped = self._link.read - self._served
        now = self._clock()
        self._servers = {peer: server for peer, server in self._servers.items() if now - server.heard < SILENCE}

    def _handle(self, peer: bytes, message: Message) -> None:
        server = self._servers.get(peer)
        if server is not None and isinstance(message, ChunksWanted):
            self._send_chunks(peer, message)
        elif server is not None and not server.may_speak(self._clock()):
            self._link.reject(peer, f"more than {MESSAGES_A_SECOND} messages a second")
        elif isinstance(message, Hello):
            self._greet(peer, message)
        elif server is not None:  # else it was turned away, or is about to say hello
            if isinstance(message, DrafterReceived | DrafterRefused):
                server.settled = max(server.settled, message.version)
            self._serve(peer, message)

    def _greet(self, peer: bytes, hello: Hello) -> None:
        name = peer.decode(errors="replace").rpartition("/")[0]
        if hello.model != self._model:
            self._link.reject(peer, f"this trainer's drafters are for {self._model}, not for {hello.model}")
        elif not hello.server.isprintable() or name != hello.server:
            self._link.reject(peer, f"server {hello.server!r} speaks as {peer!r}: its name and a token are wanted")
        elif peer not in self._servers and len(self._servers) >= MAX_SERVERS:
            self._link.reject(peer, f"this trainer has {MAX_SERVERS} servers, and takes no more")
        else:
            now = self._clock()
            self._servers.setdefault(peer, _Server(now, now)).heard = now
            self._link.send(Heartbeat(newest_drafter=self._newest), to=peer)
            self._offer(peer)
            self._serve(peer, hello)

    def _serve(self, peer: bytes, message: Message) -> None:
        self._served += 1
        self._hear(peer.decode(errors="replace"), message)

    def _offer(self, peer: bytes) -> None:
        if self._update is not None and self._update.header.version > self._servers[peer].settled:
            self._link.send(self._update.header, to=peer)

    def _send_chunks(self, peer: bytes, wanted: ChunksWanted) -> None:
        update = self._update
        if update is None or wanted.digest != update.digest:
            return  # of a drafter before this one, or of an earlier life: the offer of this one is on its way
        self._served += 1
        for index in range(wanted.start, min(wanted.stop, update.header.chunks)):
            self._link.send(DrafterChunk(digest=update.digest, index=index), update.chunk(index), to=peer)
