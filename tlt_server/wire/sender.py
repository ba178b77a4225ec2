"""The trainer's end of the control link: publishes drafters, and hears from every server."""

import time
from collections import deque
from collections.abc import Callable, Mapping
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
from tlt_server.wire.update import CHUNK_BYTES, Outgoing, Tensor, safetensors_file

SILENCE = 10.0
"""Seconds without a word after which a server counts as gone; it says hello every second."""

NOTICE_WITHIN = 0.02
"""Seconds until a quiet sender notices what another thread has asked of it."""


MAX_SERVERS = 256
"""At once; a hello of one more is rejected."""

MESSAGES_A_SECOND, MESSAGES_AT_ONCE = 64, 512
"""Of a server, but for chunks that it asks for: it says a few a second, and after a cut what it could not say."""


@dataclass
class Server:
    """What the sender knows of one: when it was heard, and the highest version that it received or refused.

    allowance: of messages, as of `counted`.
    """

    heard: float = 0.0
    settled: int = 0
    allowance: float = MESSAGES_AT_ONCE
    counted: float = 0.0

    def may_speak(self, now: float) -> bool:
        """Counts a message."""
        more = (now - self.counted) * MESSAGES_A_SECOND
        self.allowance, self.counted = min(self.allowance + more, MESSAGES_AT_ONCE), now
        self.allowance -= self.allowance >= 1
        return self.allowance >= 1


class Sender:
    """Holds the latest drafter, offers it to every server, and sends the chunks that each one asks for.

    All state of a transfer is the receiver's, so a sender that starts anew and publishes the same drafter goes on where
    the old one was.

    Args:
        link: bound, reading `READS_TO_TRAINER`; `run` closes it.
        model: the target that the drafters are for; a server of another one is turned away.
        hear: called in `run`'s thread with a server's identity (`NAME/TOKEN`, new at each of its starts) and its
            message: `Hello`, a notice, or what became of an update. Must return soon.

    Attributes:
        dropped: messages that were neither heard nor answered with chunks. From any thread.
        cut: connections until now. From any thread.
    """

    def __init__(
        self,
        link: Link,
        model: ModelIdentity,
        hear: Callable[[str, Message], None],
        clock: Callable[[], float] = time.monotonic,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._link = link
        self._model = model
        self._hear = hear
        self._clock = clock
        self._chunk_bytes = chunk_bytes
        self._servers: dict[bytes, Server] = {}
        self._newest = 0
        self._pending: deque[tuple[bytes, int, int]] = deque(maxlen=1)  # written by one thread, taken by another
        self._update: Outgoing | None = None
        self._stopped = False
        self._served = self.dropped = 0

    @property
    def cut(self) -> int:
        return self._link.cut

    def publish(
        self, version: int, trained_on: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Takes a copy of the tensors and returns; what was published before is sent no further.

        From any thread, but one at a time.

        Args:
            version: of the drafter, higher than any before.
            trained_on: the target version that it was trained on.
            metadata: goes into the safetensors file.

        Raises:
            WireError: the version is not higher, or a tensor is not one.
        """
        if version <= self._newest:
            raise WireError(f"drafter version {version} is not higher than {self._newest}, the last one: raise it")
        self._pending.append((safetensors_file(tensors, metadata or {}), version, trained_on))
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
        if isinstance(message, ChunksWanted):
            if server is not None:
                self._send_chunks(peer, message)
        elif server is not None and not server.may_speak(self._clock()):
            self._link.reject(peer, f"more than {MESSAGES_A_SECOND} messages a second")
        elif isinstance(message, Hello) and (fault := self._fault(peer, message)):
            self._link.reject(peer, fault)
        else:
            self._hear_server(peer, message)

    def _fault(self, peer: bytes, hello: Hello) -> str:
        """Why a server is turned away; empty where it is not."""
        if hello.model != self._model:
            return f"this trainer's drafters are for {self._model}, not for {hello.model}"
        if not hello.server.isprintable() or peer.decode(errors="replace").rpartition("/")[0] != hello.server:
            return f"server {hello.server!r} speaks as {peer!r}: its name and a token are wanted"
        if peer not in self._servers and len(self._servers) >= MAX_SERVERS:
            return f"this trainer has {MAX_SERVERS} servers, and takes no more"
        return ""

    def _hear_server(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._servers.setdefault(peer, Server(counted=self._clock())).heard = self._clock()
            self._link.send(Heartbeat(newest_drafter=self._newest), to=peer)
            self._offer(peer)
        if peer not in self._servers:
            return  # turned away, or about to say hello
        if isinstance(message, DrafterReceived | DrafterRefused):
            self._servers[peer].settled = max(self._servers[peer].settled, message.version)
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
