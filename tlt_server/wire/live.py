"""The active drafter of a server, for a trainer that has none to begin with: over the control link, its config, and its
file in verified chunks."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tlt_client.schemas import DrafterVersion

from tlt_server import files
from tlt_server.errors import WireError
from tlt_server.wire.files import MAX_DAMAGED, Given, Incoming, chunks_of
from tlt_server.wire.messages import (
    MAX_CONFIG,
    MAX_REASON,
    Buffer,
    Chunk,
    ChunksWanted,
    Heartbeat,
    Hello,
    Live,
    LiveFile,
    LiveWanted,
    Message,
    ModelIdentity,
)
from tlt_server.wire.sockets import Link

log = logging.getLogger(__name__)

ASK_EVERY, STALLED = 1.0, 5.0
"""Seconds: until a server that has not answered is asked again; without a chunk, until any server may be the next."""
MOST_BYTES = 64 << 30
"""Of a drafter; ten times what the largest has."""


class Giver:
    """A server's side. The file is hashed in a thread, and open until it is asked for anew.

    drafters: to be set; the active one, then those to begin with where it lies nowhere any more. The last one's folder
    has the config of all.
    """

    def __init__(self, link: Link, chunk_bytes: int) -> None:
        self.drafters: Sequence[DrafterVersion] = ()
        self._link, self._chunk_bytes = link, chunk_bytes
        self._pool = ThreadPoolExecutor(1, "giving")
        self._hashing: Future[tuple[Live, Given[LiveFile] | None]] | None = None
        self._file: Given[LiveFile] | None = None

    def hear(self, message: LiveWanted | ChunksWanted) -> None:
        if isinstance(message, ChunksWanted):
            if self._file is not None:
                self._file.send(self._link, message)
        elif self._hashing is None:
            self._hashing = self._pool.submit(_found, tuple(self.drafters), self._chunk_bytes)

    def step(self) -> None:
        """Tells of the file once it is hashed."""
        if self._hashing is not None and self._hashing.done():
            self._close_file()
            (live, self._file), self._hashing = self._hashing.result(), None
            self._link.send(live)

    def close(self) -> None:
        self._pool.shutdown()
        self._close_file()
        if self._hashing is not None:
            _, self._file = self._hashing.result()
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file.descriptor)


def _found(drafters: Sequence[DrafterVersion], chunk_bytes: int) -> tuple[Live, Given[LiveFile] | None]:
    """The first that can be given; in the thread."""
    reason = "no file of its drafter is known here"
    for each in drafters:
        try:
            return _opened(each, Path(drafters[-1].path), chunk_bytes)
        except (OSError, ValueError) as error:
            reason = f"drafter {each.version}: {error}"
            log.info("it cannot be given to the trainer: %s", reason)
    return Live(version=drafters[0].version if drafters else 0, reason=reason[:MAX_REASON]), None


def _opened(drafter: DrafterVersion, start: Path, chunk_bytes: int) -> tuple[Live, Given[LiveFile]]:
    """OSError; ValueError: it is not one file, or that file is another by now."""
    path = Path(drafter.path)
    beside = path / "config.json"
    config = files.read(beside if beside.exists() else start / "config.json", MAX_CONFIG)
    if path.is_dir():
        if len(found := sorted(path.glob("*.safetensors"))) != 1:
            raise ValueError(f"{path} holds {len(found)} safetensors files, and one can be given")
        path = found[0]
    with files.regular(path) as (file, size):
        descriptor = os.dup(file.fileno())
    try:
        whole, digests = hashlib.sha256(), []
        for chunk in chunks_of(descriptor, size, chunk_bytes):
            whole.update(chunk)
            digests.append(hashlib.sha256(chunk).digest())
        if drafter.sha256 not in (None, whole.hexdigest()) or not size:
            raise ValueError(f"{path} holds another one by now")
    except (OSError, ValueError):
        os.close(descriptor)
        raise
    header = LiveFile(size=size, chunk_bytes=chunk_bytes, digests=b"".join(digests))
    return Live(version=drafter.version, config=config, file=header), Given(header, descriptor)


class Taken(NamedTuple):
    """Of which server. path: of the file, whole and verified; None: it has none to give, for `live.reason`."""

    server: str
    live: Live
    path: Path | None


class Taker:
    """A trainer's side, before it trains: stepped until there is something `taken`. The first server that says hello is
    asked; if it falls silent, the next.

    link: bound, reading `READS_TO_TRAINER`. model: the target; servers of another are turned away. folder: for what
    arrives; an earlier life's chunks there are gone on from. OSError: the disk's.
    """

    def __init__(
        self, link: Link, model: ModelIdentity, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.taken: Taken | None = None
        self._link, self._model, self._folder, self._clock = link, model, folder, clock
        self._peer: bytes | None = None
        self._live: Live | None = None
        self._incoming: Incoming | None = None
        self._moved = self._ask_due = 0.0

    def step(self, seconds: float) -> None:
        """Waits so long for a message, handles at most one, and asks for what is due."""
        self._link.wait(seconds)
        if (arrived := self._link.receive()) is not None:
            self._hear(*arrived)
        now = self._clock()
        if self._peer is None or self.taken is not None:
            return
        if now - self._moved > STALLED:
            self._forget()
        elif self._incoming is not None:
            if (chunks := self._incoming.wanted(now)) is not None:
                self._link.send(chunks, to=self._peer)
        elif now >= self._ask_due:
            self._ask_due = now + ASK_EVERY
            self._link.send(LiveWanted(), to=self._peer)

    def _hear(self, peer: bytes, message: Message, payload: Buffer) -> None:
        if isinstance(message, Hello):
            if message.model != self._model:
                self._link.reject(peer, f"this trainer's drafters are for {self._model}, not for {message.model}")
                return
            self._link.send(Heartbeat(), to=peer)
            if self._peer in (None, peer):
                self._moved = self._clock() if self._live is None else self._moved
                self._peer = peer
        elif peer == self._peer and self.taken is None:
            if isinstance(message, Live) and self._live is None:
                self._begin(message)
            elif isinstance(message, Chunk):
                self._add(message, payload)

    def _begin(self, live: Live) -> None:
        self._live, self._moved = live, self._clock()
        if live.file is not None and live.file.size > MOST_BYTES:
            self._end(Live(version=live.version, reason=f"its file has {live.file.size} bytes"), None)
        elif live.file is None:
            self._end(live, None)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._incoming = Incoming(live.file, self._folder)
            self._incoming.resume()
            self._end_if_whole()

    def _add(self, chunk: Chunk, payload: Buffer) -> None:
        incoming = self._incoming
        if incoming is None or (chunk.digest, chunk.index) != (incoming.digest, incoming.next):
            return  # asked for twice
        try:
            incoming.add(payload, self._clock())
        except WireError as error:
            assert self._peer is not None
            self._link.reject(self._peer, str(error))
            if incoming.damaged == MAX_DAMAGED:
                self._forget()
            return
        self._moved = self._clock()
        self._end_if_whole()

    def _end_if_whole(self) -> None:
        assert self._live is not None
        assert self._incoming is not None
        if not self._incoming.missing:
            self._end(self._live, self._incoming.path)

    def _end(self, live: Live, path: Path | None) -> None:
        assert self._peer is not None
        self.taken = Taken(self._peer.decode(errors="replace").rpartition("/")[0], live, path)

    def _forget(self) -> None:
        """Whoever says hello next is asked."""
        log.info("%r gives no drafter to begin with: the next server is asked", self._peer)
        self._peer = self._live = self._incoming = None
        self._ask_due = 0.0
